"""The main job on one machine: a small hybrid served by real vLLM in four layouts, one comparison at the end."""
