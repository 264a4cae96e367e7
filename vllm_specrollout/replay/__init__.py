"""Rollouts that are over, and budgets run on them again without an engine: see docs/guides/replay.md.

May enter: the speculator, carriers, trees, budgets, drafters that look up, numpy, compression. May not: torch, vLLM.
"""
