"""Checks and times of the CUDA kernels; `specrollout bench kernels` runs them."""
