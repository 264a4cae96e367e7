"""Lossless tree speculation for RL rollouts inside vLLM.

Importing this package makes `LLM(MODEL, spec_rollout=True)` work, before or after vLLM is imported.
"""

from vllm_specrollout.plugin import register

__version__ = "0.1.0"

register()
