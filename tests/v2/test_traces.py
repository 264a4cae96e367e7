"""Replayed traces are drafted for on the V2 runner: the trace's tokens stand for the target's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import Case
from tests.e2e.identity.check import VOCAB, fuzz
from tests.e2e.identity.compare import compare, run
from tests.e2e.identity.engines import engine
from tests.v2.models import small_model
from tests.v2.test_identity import ENGINE


def test_a_replayed_trace_keeps_its_tokens_and_stocks_logprobs_with_drafts_accepted(
    tmp_path: Path, ahead: None
) -> None:
    draw, path = np.random.default_rng(5), small_model(tmp_path, "qwen3", "float32")
    requests, answers = [], {}
    for i in range(4):
        trace = draw.integers(6, VOCAB, 12 + i).tolist()
        more = {"temperature": float(i % 2), "seed": i, "max_tokens": 20, "logprobs": 2, "ignore_eos": True}
        requests.append(Case("trace", str(i), list(range(9 + i, 29 + i)), {**more, "trace_decode_token_ids": trace}))
        answers[requests[-1].problem_id] = trace
    # one without a trace is judged beside them
    alone = {"temperature": 1.0, "seed": 9, "max_tokens": 12, "logprobs": 2}
    requests.append(Case("none", "none", [5, 6, 7, 8], alone))
    settings = {**ENGINE, "enable_trace_replay": True}
    with engine(path, "float32", is_ours=False, **settings) as stock:
        truth = run(stock.llm, requests)
    for case, one in zip(requests[:4], truth, strict=False):
        assert list(one.outputs[0].token_ids) == answers[case.problem_id]
    answers["none"] = list(truth[4].outputs[0].token_ids)
    with engine(path, "float32", is_ours=True, spec_rollout={"max_draft_tokens": 6}, **settings) as ours:
        fuzz(ours, answers, 3, 0.9)
        got = run(ours.llm, requests)
        ours.runner.settle()
        assert ours.runner.stats.accepted > 0 and not ours.runner.admissions.reasons()
    report = compare(requests, truth, got, "float32")
    assert not report.failures, report.failures[:3]
