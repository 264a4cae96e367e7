"""Trainers pause an engine amid answers: what was aborted goes on, what was kept goes on, and nothing changes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm_specrollout.bench.policy.random_model import make_random_model

from tests import warm

ROOT = Path(__file__).parents[2]


def test_answers_that_were_paused_by_any_trainers_call_are_those_of_no_pause(tmp_path: Path) -> None:
    model = make_random_model(tmp_path / "tiny", arch="llama", size="1M", num_layers=2, dtype="float32", seed=7)
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(ROOT)}
    done = warm.run([str(Path(__file__).with_name("async_engine.py")), str(model)], environment, ROOT, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert len(lines) == 1, done.stdout + done.stderr
    found = json.loads(lines[0].removeprefix("RESULT"))
    assert any(0 < count < 160 and reason == "abort" for count, reason in found["cut"])
    assert found["resubmitted"] == found["drained"] == found["kept"] == found["whole"]
    assert found["accepted"] > 0
