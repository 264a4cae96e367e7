"""The V1 model runner (for CPUs)."""
