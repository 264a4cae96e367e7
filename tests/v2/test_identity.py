"""The very tokens of stock vLLM on the V2 runner: chains and trees, scheduled in lockstep and ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import ALONE, cases, features
from tests.e2e.identity.check import VOCAB, check_identity
from tests.e2e.identity.engines import Engine, model

# vLLM's own grammar kernel does not run interpreted
FEATURES = tuple(name for name in features(VOCAB) if name not in (*ALONE, "regex", "choice", "json"))
ENGINE: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 320}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous scheduling, which vLLM switches off on CPU although its engine can do it there."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def keep_async(cls: type, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_async))


def _drafted_trees(ours: Engine) -> None:
    assert ours.runner.shape[0].value == "tree"
    assert ours.runner.stats.branches_committed > 0


def _scheduled_ahead(ours: Engine) -> None:
    from vllm_specrollout.worker.v2.scheduler import SpecRolloutAsyncScheduler

    core = ours.llm.llm_engine.engine_core.engine_core
    assert core.batch_queue is not None
    assert isinstance(core.scheduler, SpecRolloutAsyncScheduler)
    assert ours.runner.stats.accepted > 0


def test_trees_yield_stocks_tokens_for_every_feature(models: Path) -> None:
    requests = cases(60, VOCAB, seed=1, max_tokens=20, only=FEATURES)
    check_identity(model(models, "qwen3", "float32"), "float32", requests, inspect=_drafted_trees, **ENGINE)


def test_chains_yield_stocks_tokens_for_every_feature(models: Path) -> None:
    requests = cases(60, VOCAB, seed=2, max_tokens=20, only=FEATURES)
    path = model(models, "qwen3", "bfloat16")
    check_identity(path, "bfloat16", requests, spec_rollout={"shape": "chain"}, **ENGINE)


@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_drafts_made_after_scheduling_ahead_yield_stocks_tokens(models: Path, ahead: None, shape: str) -> None:
    requests = cases(40, VOCAB, seed=3, max_tokens=20, only=FEATURES)
    path = model(models, "llama", "float32")
    check_identity(path, "float32", requests, spec_rollout={"shape": shape}, inspect=_scheduled_ahead, **ENGINE)


def test_preempted_requests_yield_stocks_tokens(models: Path, ahead: None) -> None:
    requests = cases(24, VOCAB, seed=4, max_tokens=60, only=("greedy", "temperature 1", "repetition penalty"))
    path = model(models, "qwen3", "float32")
    # a few blocks for all: some must go and come back
    scarce = {**ENGINE, "num_gpu_blocks_override": 14, "max_num_seqs": 8}
    preempted: list[int] = []

    def count(ours: Engine) -> None:
        preempted.append(ours.runner.stats.preempted)

    check_identity(path, "float32", requests, inspect=count, **scarce)
    assert preempted[0] > 0


def test_prompts_prefilled_in_chunks_beside_drafts_yield_stocks_tokens(models: Path) -> None:
    requests = cases(16, VOCAB, seed=5, max_tokens=20, only=("temperature 1", "prompt logprobs"))
    path = model(models, "mistral", "float32")
    check_identity(path, "float32", requests, **{**ENGINE, "max_num_batched_tokens": 64, "max_num_seqs": 8})
