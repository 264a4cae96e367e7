"""The small real policy that the benchmarks run, its tasks and reward, and models of other sizes made from it.

Submodules: `tasks` and `reward` (pure Python), `tokenizer`, `random_model`, `inflate`, `train`, `grpo`, `evaluate`.
"""
