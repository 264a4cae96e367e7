"""Rows that vLLM gives by survival and cost (its adaptive verification), with drafts of ours and exact tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB, fuzz
from tests.e2e.identity.compare import compare, run
from tests.e2e.identity.engines import Engine, engine
from tests.v2.models import small_model
from tests.v2.test_identity import ENGINE

ASKED = ("greedy", "temperature 1", "top_p", "frequency penalty", "logprobs", "bad words")


def by_cost(ours: Engine, row_ms: float) -> list[tuple[int, int]]:
    """Have vLLM choose rows as on a device whose steps take so long for each; returns (drafts, rows given) by step."""
    runner, given = ours.runner, list[tuple[int, int]]()
    manager = adaptive_verification.AdaptiveVerificationManager(
        runner.req_states, runner.input_buffers.query_start_loc, 1, 1 << 12
    )
    rows = [(n, 10.0 + row_ms * n) for n in (1, 4, 16, 64, 256)]
    manager.set_cost_curves([(1, 0.1), (16, 0.1)], rows)
    stock = manager.reallocate_drafts

    def noted(*args: Any) -> Any:
        drafts = sum(manager._batch_budget[0].values())
        found = stock(*args)
        given.append((drafts, found[2]))
        return found

    manager.reallocate_drafts = noted
    runner.adaptive_verification = manager
    return given


@pytest.mark.parametrize("row_ms", [0.3, 5.0], ids=["some rows pay", "no row pays"])
def test_rows_given_by_cost_yield_stocks_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: None, row_ms: float
) -> None:
    # its compiled form takes seconds to make here
    eager = adaptive_verification._assign_draft_token_budget
    monkeypatch.setattr(adaptive_verification, "_assign_draft_token_budget_compiled", eager)
    requests = cases(12, VOCAB, seed=6, max_tokens=8, only=ASKED)
    path = small_model(tmp_path, "qwen3", "float32")
    with engine(path, "float32", is_ours=False, **ENGINE) as stock:
        truth = run(stock.llm, requests)
    answers = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, truth, strict=True)}
    own = {"max_draft_tokens": 6, "max_depth": 6, "shape": "chain"}
    with engine(path, "float32", is_ours=True, spec_rollout=own, **ENGINE) as ours:
        given = by_cost(ours, row_ms)
        fuzz(ours, answers, 7, 0.9)
        got = run(ours.llm, requests)
        ours.runner.settle()
        stats = ours.runner.stats
    assert any(rows < drafts for drafts, rows in given), "some drafts had no row"
    if row_ms < 1.0:
        assert stats.accepted > 0 and any(0 < rows < drafts for drafts, rows in given)
        assert stats.drafted <= np.sum(given, axis=0)[1]
    report = compare(requests, truth, got, "float32")
    assert not report.failures, report.failures[:3]
