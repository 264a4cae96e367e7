"""Checks and times of the CUDA kernels; `bench/gpu/first_hour.sh` runs them."""
