"""Recorded rollouts, and policies run on them again without an engine: see docs/guides/replay.md.

May enter: carriers, trees, policies, numpy, compression. May not: torch, vLLM, drafters. Clocks come from outside.
"""
