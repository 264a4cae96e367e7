"""A server's engine gets its first head by itself, in processes of its own, with its trainer on the same cores."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("speculators")

from vllm_specrollout.bench.policy import CHECKPOINT

from tests.integration.serving import run_beside


@pytest.mark.nightly
def test_a_head_is_made_in_idle_moments_and_those_who_come_halt_its_trainer(tmp_path: Path) -> None:
    told = run_beside("async_learning", tmp_path, CHECKPOINT)
    tokens, accepted = told["first"]
    assert accepted == 0, "an untrained head rests"
    assert told["number"] >= 1, told["error"]
    assert told["second"][0] == tokens and told["second"][1] > 0
    assert told["halts"] >= 1 and told["lone"] >= 1
    assert told["learning"]["number"] >= 1 and told["learning"]["trainer_rows"] > 0
    assert not told["is_trainer_there"], "it ends with its engine"
