"""Naive twins: what fast code is to compute, written to be read."""
