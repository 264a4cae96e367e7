"""TRL's own trainer, unmodified, with the engine in its process: three steps, drafts on, drafts off, and stock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

from tests import warm

COMPARE = Path(__file__).parents[2] / "examples" / "trl" / "compare.py"


def test_three_steps_of_grpo_are_those_without_drafts_and_those_of_stock(tmp_path: Path) -> None:
    # compiling takes longer than these steps, and changes no token that any of the four runs would not change
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_ATTN_SPLIT_KV": "0"}
    flags = ["--one-process", "--steps", "3", "--problems", "4", "--problems-per-step", "2", "--max-tokens", "64"]
    done = warm.run([str(COMPARE), *flags, "--record", str(tmp_path / "steps")], environment, tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "stock and ours: tokens and rewards equal in 3 steps" in lines
    assert "drafts on and drafts off: tokens and rewards equal in 3 steps" in lines
    drafted = {line.partition(":")[0]: line.rpartition(";")[2].split() for line in lines if " from step 3 on; " in line}
    assert int(drafted["ours"][0]) > 0 and int(drafted["drafts on"][0]) > 0
    assert drafted["drafts off"][0] == "0" and drafted["stock"] == ["no", "drafts"]
