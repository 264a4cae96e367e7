"""Benchmarks. The inner folders live in bench/ of the repository; setup.py maps them here."""
