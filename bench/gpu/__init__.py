"""Measurements on one CUDA GPU: kernels, engines, graph memory. `python -m vllm_specrollout.bench.gpu --help`."""
