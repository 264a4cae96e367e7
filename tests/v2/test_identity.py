"""The very tokens of stock vLLM on the V2 runner: chains and trees, scheduled in lockstep and ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import LLM

from tests.e2e.identity.cases import ALONE, BEGINS, THINKING, Case, cases, features
from tests.e2e.identity.check import VOCAB, check_identity, fuzz, judged
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import Engine, engine
from tests.v2.models import small_model as model
from vllm_specrollout.worker.v2.graphs import TREES_UP_TO

# requests with a grammar are test_grammar.py's
FEATURES = tuple(name for name in features(VOCAB) if name not in (*ALONE, "regex", "choice", "json"))
ENGINE: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 320}
TREE = {"max_draft_tokens": 6, "max_depth": 6}
CHAIN = {**TREE, "shape": "chain"}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def _drafted_trees(ours: Engine) -> None:
    assert ours.runner.shape[0].value == "tree"
    ours.runner.settle()
    assert ours.runner.stats.branches_committed > 0
    # the name under which trainers look for what drafts
    assert ours.runner.drafter is ours.runner.spec_rollout


def _scheduled_ahead(ours: Engine) -> None:
    from vllm_specrollout.worker.v2.scheduler import SpecRolloutAsyncScheduler

    core = ours.llm.llm_engine.engine_core.engine_core
    assert core.batch_queue is not None
    assert isinstance(core.scheduler, SpecRolloutAsyncScheduler)
    assert ours.runner.stats.accepted > 0


def test_trees_yield_stocks_tokens_for_every_feature(models: Path) -> None:
    requests = cases(32, VOCAB, seed=1, max_tokens=6, only=FEATURES)
    # here a budget is no state that others could take up, so stock's batch is a reference
    for budget in (0, 2):
        params = {"max_tokens": 6, "ignore_eos": True, "seed": budget, "thinking_token_budget": budget}
        requests.append(Case("on a budget", f"budget {budget}", [9, 8, 7, BEGINS], params))
    # as many as trees are drafted for
    settings = {**ENGINE, "max_num_seqs": TREES_UP_TO, "reasoning_config": THINKING}
    check_identity(
        model(models, "qwen3", "float32"), "float32", requests, spec_rollout=TREE, inspect=_drafted_trees, **settings
    )


@pytest.mark.nightly
def test_chains_yield_stocks_tokens_for_every_feature(models: Path) -> None:
    requests = cases(27, VOCAB, seed=2, max_tokens=6, only=FEATURES)
    path = model(models, "qwen3", "bfloat16")
    check_identity(path, "bfloat16", requests, spec_rollout=CHAIN, **ENGINE)


@pytest.mark.parametrize("drafts", [TREE, CHAIN], ids=["tree", "chain"])
def test_drafts_made_after_scheduling_ahead_yield_stocks_tokens(
    models: Path, ahead: None, drafts: dict[str, Any]
) -> None:
    requests = cases(
        10, VOCAB, seed=3, max_tokens=8, only=("greedy", "temperature 1", "top_p", "frequency penalty", "logprobs")
    )
    path = model(models, "llama", "float32")
    check_identity(path, "float32", requests, spec_rollout=drafts, inspect=_scheduled_ahead, **ENGINE)


def test_preempted_requests_yield_stocks_tokens_and_drafts_preempt_nobody(models: Path, ahead: None) -> None:
    """Too few blocks for all: requests are thrown out mid-answer, and prefilled again; no more often than by stock."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_specrollout.worker.v2.scheduler import SchedulerMixinV2

    by_ours: list[bool] = []
    original = Scheduler._preempt_request

    def counting(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        by_ours.append(isinstance(self, SchedulerMixinV2))
        return original(self, request, *args, **kwargs)

    requests = [
        Case("pressure", str(i), list(range(5 + i, 35 + i)), {"max_tokens": 20, "seed": i, "ignore_eos": True})
        for i in range(6)
    ]
    scarce = {**ENGINE, "max_model_len": 128, "block_size": 32, "num_gpu_blocks_override": 9, "max_num_seqs": 6}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_preempt_request", counting)
        check_identity(
            model(models, "qwen3", "float32"),
            "float32",
            requests,
            enable_prefix_caching=False,
            spec_rollout=TREE,
            **scarce,
        )
    # ours answers them twice: without drafts, and with
    assert 0 < sum(by_ours) <= 1.05 * 2 * by_ours.count(False)


@pytest.mark.nightly
def test_prompts_prefilled_in_chunks_beside_drafts_yield_stocks_tokens(models: Path) -> None:
    requests = cases(4, VOCAB, seed=5, max_tokens=8, only=("temperature 1", "greedy", "logprobs"))
    path = model(models, "mistral", "float32")
    check_identity(
        path, "float32", requests, spec_rollout=TREE, **{**ENGINE, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    )


def test_lora_adapters_and_the_base_model_mix_in_one_batch(models: Path) -> None:
    from vllm.lora.request import LoRARequest

    from tests.e2e.identity.test_engine_features import random_adapter

    path = model(models, "qwen3", "float32")
    adapter = random_adapter(models / "adapter", path)
    requests = cases(4, VOCAB, seed=7, max_tokens=12, only=("temperature 1", "greedy"))

    def generate(llm: LLM, some: list[Case]) -> Any:
        chosen = [LoRARequest("a", 1, adapter) if int(case.problem_id) % 2 else None for case in some]
        prompts = [{"prompt_token_ids": case.prompt} for case in some]
        return llm.generate(prompts, [case.sampling() for case in some], lora_request=chosen, use_tqdm=False)

    settings: dict[str, Any] = {**ENGINE, "enable_lora": True, "max_lora_rank": 8}
    with engine(path, "float32", is_ours=False, **settings) as stock:
        truth, base = generate(stock.llm, requests), run(stock.llm, requests)
    assert any(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(truth, base, strict=True))
    answers = {c.problem_id: list(o.outputs[0].token_ids) for c, o in zip(requests, truth, strict=True)}
    with engine(path, "float32", is_ours=True, spec_rollout=TREE, **settings) as ours:
        fuzz(ours, answers, 4, 0.8)
        drafted = generate(ours.llm, requests)
        assert ours.runner.stats.branches_committed > 0 and ours.runner.stats.accepted > 0

    def ask(judge: LLM, case: Case) -> Any:
        return generate(judge, [case])[0]

    report = judged(path, "float32", requests, truth, drafted, ask, **settings)
    assert not report.failures, report.failures


def test_finished_requests_leave_nothing_behind(models: Path, ahead: None) -> None:
    requests = cases(4, VOCAB, seed=8, max_tokens=8, only=("temperature 1", "greedy"))
    with engine(model(models, "qwen3", "float32"), "float32", is_ours=True, spec_rollout=CHAIN, **ENGINE) as ours:
        run(ours.llm, requests)
        # its second sample has the next seed, which 64 bits with a sign do not hold: stock's engine ends there
        seeds = replace(requests[0], params={"seed": 2**63 - 1, "n": 2, "max_tokens": 8, "ignore_eos": True})
        first, second = (list(one.token_ids) for one in run(ours.llm, [seeds])[0].outputs)
        assert len(first) == len(second) == 8 and first != second
        run(ours.llm, requests[:1])
        # the last one's end is told with the next step
        assert len(ours.runner.host._requests) <= 1
        ours.runner.settle()
        assert ours.runner.host.num_in_flight == 0
