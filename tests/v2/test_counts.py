"""The V2 runner's metrics against its worker's own totals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY

from bench.runner.oracle import ORACLE
from tests.e2e.identity.cases import Case
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine
from tests.v2.models import small_model


def _total(stage: str, name: str = "nodes") -> float:
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    own = [sample for sample in samples if sample.name == f"vllm:spec_rollout_{name}_total"]
    return sum(sample.value for sample in own if sample.labels["stage"] == stage)


@pytest.mark.nightly
def test_metrics_agree_with_the_worker(tmp_path: Path) -> None:
    cases = [Case("one", str(i), [5 + i, 6, 7, 5 + i, 6, 7, 5 + i, 6], {"max_tokens": 24, "seed": i}) for i in range(3)]
    path = small_model(tmp_path, "qwen3", "float32")
    settings = {"ngram": {"min_match": 1}}
    with engine(path, "float32", is_ours=True, spec_rollout=settings, max_num_seqs=4, disable_log_stats=False) as ours:
        run(ours.llm, cases)
        stats = ours.llm.collective_rpc("spec_rollout_stats")[0]
        assert stats["drafted"] > 0
        assert _total("verified") == _total("verified", "context_nodes") == stats["drafted"]
        assert _total("accepted") == _total("accepted", "context_nodes") == stats["accepted"]
        assert _total("drafted") >= stats["drafted"]


def test_what_the_oracle_drafts_can_be_changed_between_runs(tmp_path: Path) -> None:
    path, oracle = small_model(tmp_path, "qwen3", "float32"), tmp_path / "oracle.json"
    oracle.write_text("{}")
    settings = {"drafters": [{"name": ORACLE, "path": str(oracle)}], "max_draft_tokens": 4, "max_depth": 4}
    cases = [Case("one", "0", [5, 6, 7, 8], {"max_tokens": 8, "seed": 0, "ignore_eos": True})]
    more = {"max_num_seqs": 4, "worker_extension_cls": "vllm_specrollout.bench.runner.tuning.Tuning"}
    with engine(path, "float32", is_ours=True, spec_rollout=settings, **more) as ours:
        answer = run(ours.llm, cases)[0].outputs[0].token_ids
        oracle.write_text(json.dumps({cases[0].problem_id: list(answer)}))
        ours.llm.collective_rpc("spec_rollout_stats", args=(True,))
        ours.llm.collective_rpc("spec_rollout_set_oracle", kwargs={"path": str(oracle), "accuracy": [1.0]})
        assert run(ours.llm, cases)[0].outputs[0].token_ids == answer
        stats = ours.llm.collective_rpc("spec_rollout_stats")[0]
        assert stats["drafted"] == stats["accepted"] > 0
