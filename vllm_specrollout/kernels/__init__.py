"""Triton kernels. The inner folders live in kernels/ of the repository; setup.py maps them here. None imports vLLM."""
