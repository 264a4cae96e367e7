"""Withheld verdicts on the V2 runner: answers stay stock's, and plain decoding finds every token again."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB, check_identity
from tests.e2e.identity.engines import Engine
from tests.v2.models import small_model
from vllm_specrollout.worker import withheld

KINDS = ("greedy", "temperature 1", "frequency penalty", "logprobs")


@pytest.mark.nightly
def test_answers_are_stocks_though_many_verdicts_are_withheld(
    tmp_path: Path, ahead: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(withheld, "STEPS_PER_TOKEN", 2)

    def inspect(ours: Engine) -> None:
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
        assert stats["withheld_checked"] > 5 and stats["withheld_differing"] == 0
        # the runner learns with the next step that the last ones are over
        assert set(ours.runner.drafting.withheld.held) <= set(ours.runner.host._requests)

    check_identity(
        small_model(tmp_path, "qwen3", "float32"),
        "float32",
        cases(8, VOCAB, seed=13, max_tokens=14, only=KINDS),
        spec_rollout={"max_draft_tokens": 6, "max_depth": 4},
        inspect=inspect,
        max_num_seqs=16,
        max_model_len=320,
    )
