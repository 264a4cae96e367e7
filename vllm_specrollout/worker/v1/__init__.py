"""The V1 model runner (what vLLM uses on CPU)."""
