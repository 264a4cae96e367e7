"""The small real policy that the benchmarks run, its tasks and reward, and models of other sizes made from it.

Submodules: `tasks` and `reward` (pure Python), `tokenizer`, `random_model`, `inflate`, `train`, `grpo`.
"""

from pathlib import Path

# beside this file in a checkout and where a wheel was installed alike
CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The trained policy that comes with the project."""
HEAD = CHECKPOINT.with_name("head")
"""An EAGLE-3 head that drafts for it."""
DRAFT = CHECKPOINT.with_name("draft")
"""A draft model of a quarter of its size, which does as well."""
