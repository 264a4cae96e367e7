"""A server's engine gets its first head by itself, in processes of its own, with its trainer on the same cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("speculators")

from vllm_specrollout.bench.policy import CHECKPOINT

ROOT = Path(__file__).parents[2]


def run(folder: Path, *devices: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.async_learning", folder, CHECKPOINT, *devices],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT"))


def test_a_head_is_made_in_idle_moments_and_those_who_come_halt_its_trainer(tmp_path: Path) -> None:
    told = run(tmp_path)
    tokens, accepted = told["first"]
    assert accepted == 0, "an untrained head rests"
    assert told["number"] >= 1, told["error"]
    assert told["second"][0] == tokens and told["second"][1] > 0
    assert told["halts"] >= 1 and told["lone"] >= 1
    assert told["learning"]["number"] >= 1 and told["learning"]["trainer_rows"] > 0
    assert not told["is_trainer_there"], "it ends with its engine"
