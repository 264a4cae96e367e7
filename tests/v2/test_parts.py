"""A step with many rows is judged in parts: no bit of what is found depends on which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB, fuzz
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine
from tests.v2.models import small_model
from vllm_specrollout.worker.v2 import verify

FEATURES = ("greedy", "temperature 1", "top_p", "top_k", "min_p", "frequency penalty", "bad words", "logit bias")


@pytest.mark.nightly
def test_a_step_judged_in_parts_yields_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds, judge, rows = verify.part_bounds, verify.TreeVerifier._judge, []

    def judged(self: Any, logits: torch.Tensor, batch: Any, inputs: Any) -> Any:
        found = []
        for most in (1 << 20, 20, 9, 1):
            monkeypatch.setattr(verify, "part_bounds", lambda starts, *_, most=most: bounds(starts, most))
            verdict, processed = judge(self, logits.clone(), batch, inputs)
            found.append((verdict.token_ids, verdict.num_sampled, verdict.path, processed))
        assert all(torch.equal(a, b) for parts in found[1:] for a, b in zip(found[0], parts, strict=True))
        rows.append(len(logits))
        return judge(self, logits, batch, inputs)

    requests = cases(12, VOCAB, seed=5, max_tokens=5, only=FEATURES)
    path = small_model(tmp_path, "qwen3", "float32")
    settings: dict[str, Any] = {"max_num_seqs": 12, "max_model_len": 320, "logprobs_mode": "processed_logits"}
    with engine(path, "float32", is_ours=True, spec_rollout={"max_draft_tokens": 6}, **settings) as ours:
        truth = run(ours.llm, requests, enabled=False)
        answers = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, truth, strict=True)}
        fuzz(ours, answers, 0, 0.9)
        monkeypatch.setattr(verify.TreeVerifier, "_judge", judged)
        drafted = run(ours.llm, requests)
    assert max(rows) > 20
    for a, b in zip(truth, drafted, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
