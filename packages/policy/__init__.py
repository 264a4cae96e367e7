"""The small real policy that the benchmarks run, its tasks and reward, and models of other sizes made from it.

Submodules: `tasks` and `reward` (pure Python), `tokenizer`, `random_model`, `inflate`, `train`, `grpo`.
"""

import os
from pathlib import Path

VARIABLE = "SPECROLLOUT_POLICY"
"""Holds the checkout's folder of this file, where the wheel is installed: it has no weights."""
CHECKPOINT = Path(os.environ.get(VARIABLE) or Path(__file__).parent) / "checkpoint"
"""The trained policy that comes with the checkout."""
HEAD = CHECKPOINT.with_name("head")
"""An EAGLE-3 head that drafts for it."""
DRAFT = CHECKPOINT.with_name("draft")
"""A draft model of a quarter of its size, which does as well."""
