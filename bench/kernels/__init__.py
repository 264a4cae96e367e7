"""Micro-benchmarks of the CUDA kernels; `python -m vllm_specrollout.bench.gpu` runs them."""
