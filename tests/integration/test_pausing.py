"""Trainers pause an engine amid answers: what was aborted goes on, what was kept goes on, and nothing changes."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_specrollout.bench.policy.random_model import make_random_model

from tests import warm
from tests.integration.serving import ROOT, result_of


def test_answers_that_were_paused_by_any_trainers_call_are_those_of_no_pause(tmp_path: Path) -> None:
    model = make_random_model(tmp_path / "tiny", arch="llama", size="1M", num_layers=2, dtype="float32", seed=7)
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(ROOT)}
    done = warm.run([str(Path(__file__).with_name("async_engine.py")), str(model)], environment, ROOT, timeout=300)
    found = result_of(done)
    assert any(0 < count < 160 and reason == "abort" for count, reason in found["cut"])
    assert found["resubmitted"] == found["drained"] == found["kept"] == found["whole"]
    assert found["accepted"] > 0
