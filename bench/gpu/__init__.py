"""Measurements on one CUDA GPU: kernels, identity, engines. `bench/gpu/first_hour.sh --help`."""
