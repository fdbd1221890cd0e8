"""A CPU stand-in for Intel's closed `habana_frameworks`: enough to run vllm-gaudi's real code. See README.md."""
