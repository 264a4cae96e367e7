"""Recorded rollouts, and budgets run on them again without an engine: see docs/guides/replay.md.

May enter: the speculator, carriers, trees, budgets, numpy, compression. May not: torch, vLLM, other drafters.
"""
