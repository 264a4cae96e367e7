"""The V1 runner with the noise of vLLM before 0.32, a vector per token, over the installed one: stock's tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from tests.e2e.identity.cases import ALONE, cases, features
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import compare, run
from tests.e2e.identity.engines import engine, model
from tests.e2e.identity.fuzz import FuzzDrafter
from vllm_specrollout.patches import features as versions
from vllm_specrollout.worker.v1 import sampler


@pytest.fixture
def vector_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock samples as older versions do; ours follows their row of the table."""
    row = replace(versions.installed(), cpu_noise="vector")
    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", TopKTopPSampler.forward_native)
    monkeypatch.setattr(versions, "installed", lambda: row)


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.identity), "float32"])
def test_trees_with_noise_drawn_as_vectors_yield_stocks_tokens(tmp_path: Path, vector_noise: None, dtype: str) -> None:
    path = model(tmp_path, "qwen3", dtype)
    only = tuple(name for name in features(VOCAB) if name not in ALONE)
    requests = cases(2 * len(only), VOCAB, seed=23, max_tokens=24, only=only)
    with engine(path, dtype, is_ours=False) as stock:
        truth = run(stock.llm, requests)
    answers: Any = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, truth, strict=True)}
    with engine(path, dtype, is_ours=True, spec_rollout={"max_draft_tokens": 8}) as ours:
        assert isinstance(ours.runner.noise, sampler.ExponentialNoise)
        ours.runner.spec_rollout.replace_drafters([FuzzDrafter(answers, VOCAB, seed=2)])
        drafted = run(ours.llm, requests)
        assert ours.runner.stats.accepted > 0 and ours.runner.stats.branches_committed > 0
    report = compare(requests, truth, drafted, dtype)
    assert not report.failures, report.failures[:10]


@pytest.mark.nightly
def test_drafts_beyond_what_noise_may_take_are_cut_and_cost_no_token(
    tmp_path: Path, vector_noise: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "MOST_NOISE_BYTES", 5 * 4 * VOCAB)
    path = model(tmp_path, "llama", "float32")
    requests = cases(8, VOCAB, seed=22, max_tokens=24, only=("temperature 1", "top_p"))
    with engine(path, "float32", is_ours=False) as stock:
        truth = run(stock.llm, requests)
    answers: Any = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, truth, strict=True)}
    with engine(path, "float32", is_ours=True, spec_rollout={"max_draft_tokens": 8}) as ours:
        ours.runner.spec_rollout.replace_drafters([FuzzDrafter(answers, VOCAB, seed=2)])
        drafted = run(ours.llm, requests)
        stats = ours.runner.stats
        assert 0 < stats.accepted < stats.drafted <= 5 * stats.steps
    assert not compare(requests, truth, drafted, "float32").failures
