"""The RL loop: GRPO of the small policy, rolled out by stock vLLM, vLLM's own speculation and ours, in one run."""
