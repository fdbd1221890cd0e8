"""`inpage serve`: vLLM's OpenAI server with the layout and the defaults that caching needs."""
