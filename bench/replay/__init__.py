"""Recorded rollouts of the small policy: how tests/traces is made, and whether replays agree with the engine."""
