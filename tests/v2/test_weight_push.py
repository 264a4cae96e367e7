"""Weights pushed into a running engine, one call per parameter, on the V2 runner."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from safetensors.torch import load_file
from vllm_specrollout.bench.policy.random_model import make_random_model

from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import Engine, engine

REQUESTS = cases(2, VOCAB, seed=11, max_tokens=4, only=("temperature 1", "greedy"))


def answers(one: Engine) -> list[list[int]]:
    one.llm.reset_prefix_cache()
    return [list(output.outputs[0].token_ids) for output in run(one.llm, REQUESTS)]


def test_a_push_per_parameter_is_what_a_reload_of_these_weights_is(tmp_path: Path) -> None:
    first, second = (
        make_random_model(tmp_path / str(seed), arch="llama", size="1M", num_layers=1, dtype="float32", seed=seed)
        for seed in (7, 8)
    )
    drafts = {"max_draft_tokens": 4, "max_depth": 4, "shape": "chain"}
    with engine(str(first), "float32", is_ours=True, spec_rollout=drafts, max_num_seqs=4, max_model_len=320) as ours:
        before = answers(ours)
        for name, weight in load_file(second / "model.safetensors").items():
            ours.runner.model.load_weights([(name, weight)])
        pushed = answers(ours)
        assert ours.runner.weights_version.number == 1
        ours.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        assert answers(ours) == pushed != before
