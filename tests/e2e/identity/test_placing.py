"""The very tokens of stock vLLM wherever `placement: auto` has a model draft: in the steps, beside them, or nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.drafting_models import perturbed
from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import compare, run
from tests.e2e.identity.engines import engine, model
from vllm_specrollout.cluster.planner import Plan
from vllm_specrollout.cluster.rates import Mode
from vllm_specrollout.worker.models import decoupled

pytestmark = pytest.mark.nightly


def plan(mode: Mode) -> Plan:
    return Plan(mode=mode, draft_gpus=1, verify_gpus=1, groups=1, batch=8, window=3)


@pytest.mark.parametrize("best", [None, Mode.COUPLED, Mode.DECOUPLED, Mode.OWN])
def test_a_model_drafts_where_it_is_planned_to_and_no_token_changes(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: Mode | None
) -> None:
    target = model(models, "llama", "float32")
    requests = cases(12, VOCAB, seed=23, max_tokens=24)
    small = perturbed(target, tmp_path / "draft", 0.1)
    known = {} if best is None else {str(small): (plan(Mode.DECOUPLED), plan(best))}
    monkeypatch.setattr(decoupled, "planned", lambda vllm_config: known)
    given = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 4}
    own = {"drafters": [], "budget": "fixed", "max_draft_tokens": 8, "placement": "auto"}
    own["devices"] = [f"cpu:{max(os.sched_getaffinity(0))}"]
    with engine(target, "float32", is_ours=False) as stock:
        truth = run(stock.llm, requests)
    with engine(target, "float32", is_ours=True, spec_rollout={**own, "speculative_config": given}) as ours:
        report = compare(requests, truth, run(ours.llm, requests), "float32")
        assert not report.failures, report.failures[:3]
        here, links = ours.runner.model_drafter, ours.runner.remote.links
        assert here.is_resting is (best in (Mode.DECOUPLED, Mode.OWN))
        assert [link.window for link in links.values()] == ([3] if best is Mode.DECOUPLED else [])
        # whether a drafter beside them is in time depends on the host; it was told of all requests
        assert [link.counts.opened for link in links.values()] == ([12] if best is Mode.DECOUPLED else [])
        assert best is Mode.DECOUPLED or (ours.runner.stats.accepted > 0) is (best is not Mode.OWN)
