"""Spec rollout on vLLM's V2 model runner."""
