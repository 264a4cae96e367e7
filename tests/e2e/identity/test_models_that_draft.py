"""The very tokens of stock vLLM where a model drafts: vLLM's own proposers, sound and broken, alone and with others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import LLM, SamplingParams

from tests.e2e.drafting_models import drafting_with, with_own_layers
from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB, check_identity
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import Engine, engine, model
from tests.e2e.identity.test_engine_features import random_adapter
from tests.e2e.short_context import check_around_long_ones, with_context
from vllm_specrollout.budgets.step_cost import TIME_SHARE
from vllm_specrollout.config import envs

FIXED = {"drafters": [], "budget": "fixed", "max_draft_tokens": 12, "max_depth": 5}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("eagle3", "tree"), ("draft_model", "chain")]
    + [
        pytest.param(kind, "tree", marks=pytest.mark.nightly)
        for kind in ("draft_model", "eagle", "peagle", "dflash", "medusa")
    ]
    + [pytest.param(kind, "chain", marks=pytest.mark.identity) for kind in ("eagle3", "peagle")],
)
def test_a_model_drafts_and_the_tokens_are_stocks(models: Path, tmp_path: Path, kind: str, shape: str) -> None:
    target = model(models, "llama", "float32")
    spec_rollout = {**FIXED, "shape": shape, "speculative_config": drafting_with(kind, target, tmp_path / "draft")}
    requests = cases(29, VOCAB, seed=11, max_tokens=24)
    check_identity(target, "float32", requests, num_drafters=0, spec_rollout=spec_rollout)


@pytest.mark.nightly
def test_layers_of_the_targets_own_draft_and_the_tokens_are_stocks(models: Path, tmp_path: Path) -> None:
    target = with_own_layers(model(models, "llama", "float32"), tmp_path / "target")
    spec_rollout = {**FIXED, "speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
    requests = cases(29, VOCAB, seed=17, max_tokens=24)
    check_identity(target, "float32", requests, num_drafters=0, spec_rollout=spec_rollout)


@pytest.mark.identity
@pytest.mark.parametrize("kind", ["huge", "constant"])
def test_a_broken_model_costs_speed_and_nothing_else(models: Path, tmp_path: Path, kind: str) -> None:
    target = model(models, "llama", "float32")
    spec_rollout = {**FIXED, "speculative_config": drafting_with(kind, target, tmp_path / "draft")}
    requests = cases(6, VOCAB, seed=12, max_tokens=40, only=("temperature 1.5", "temperature 1", "greedy"))
    check_identity(target, "float32", requests, num_drafters=0, spec_rollout=spec_rollout, must_accept=False)


def test_a_model_whose_logits_are_no_numbers_is_named_and_left_alone(models: Path, tmp_path: Path) -> None:
    target = model(models, "llama", "float32")
    spec_rollout = {**FIXED, "speculative_config": drafting_with("nan", target, tmp_path / "draft")}
    requests = cases(6, VOCAB, seed=12, max_tokens=60, only=("temperature 1.5", "temperature 1", "greedy"))
    with engine(target, "float32", is_ours=True, spec_rollout=spec_rollout) as ours:
        plain = run(ours.llm, requests, enabled=False)
        ours.runner.spec_rollout.guard.is_strict = False
        drafted = run(ours.llm, requests)
        health = ours.runner.spec_rollout.health()["drafters"]["model"]
    assert health["state"] == "probation" and "no numbers" in health["error"]
    assert [list(o.outputs[0].token_ids) for o in drafted] == [list(o.outputs[0].token_ids) for o in plain]


@pytest.mark.parametrize("limit", ["the model's own", pytest.param("the user's", marks=pytest.mark.nightly)])
def test_nobody_is_drafted_for_behind_the_models_context_and_nothing_stays_of_it(
    models: Path, tmp_path: Path, limit: str
) -> None:
    """Without prefix caching a block that long ones have used is another's next, and with it short ones share it."""
    target = model(models, "llama", "float32")
    given = {**drafting_with("draft_model", target, tmp_path / "draft"), "num_speculative_tokens": 4}
    with_context(given["model"], 96)
    if limit == "the user's":
        with_context(given["model"], 512)
        given["max_model_len"] = 96
    spec_rollout = {**FIXED, "speculative_config": given}
    is_cached = limit == "the user's"
    with engine(
        target, "float32", is_ours=True, spec_rollout=spec_rollout, block_size=32, enable_prefix_caching=is_cached
    ) as ours:
        check_around_long_ones(ours, 96, count=6, prompt=40, answer=40, long=(200, 90), times=2 if is_cached else 1)
        assert ours.runner.spec_rollout.health()["drafters"]["model"]["most_tokens"] == 92


@pytest.mark.parametrize(
    "kind", ["eagle3", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("eagle", "medusa", "dflash"))]
)
def test_a_head_drafts_before_amid_and_after_requests_with_adapters(models: Path, tmp_path: Path, kind: str) -> None:
    from vllm.lora.request import LoRARequest

    target = model(models, "llama", "float32")
    spec_rollout = {**FIXED, "speculative_config": drafting_with(kind, target, tmp_path / "head")}
    one, two = (LoRARequest(f"a{i}", i, random_adapter(tmp_path / str(i), target, seed=i)) for i in (1, 2))
    prompts = [{"prompt_token_ids": [9 + i, 40, 41, 42 + i]} for i in range(6)]

    def decode(ours: Engine, chosen: list[LoRARequest | None], **options: object) -> tuple[list[list[int]], int]:
        before = ours.llm.collective_rpc("spec_rollout_stats")[0]["drafted"]
        own = {"spec_rollout": options}
        params = [SamplingParams(seed=i, max_tokens=20, ignore_eos=True, extra_args=own) for i in range(6)]
        out = ours.llm.generate(prompts, params, lora_request=chosen, use_tqdm=False)
        now = ours.llm.collective_rpc("spec_rollout_stats")[0]["drafted"]
        return [list(o.outputs[0].token_ids) for o in out], now - before

    adapters = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with engine(target, "float32", is_ours=True, spec_rollout=spec_rollout, **adapters) as ours:
        answers = []
        # who has none stays apart: beside an adapter, vLLM's CPU kernels give everybody one
        for chosen in ([None] * 6, [one] * 6, [one, two] * 3, [None] * 6):
            plain, _ = decode(ours, chosen, enabled=False)
            tokens, drafted = decode(ours, chosen)
            assert tokens == plain and drafted > 0
            answers.append(tokens)
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    assert answers[0] == answers[3] and answers[0] != answers[1] != answers[2]
    assert stats["accepted"] > 0 and not stats["failures"]


def test_the_union_of_a_model_and_a_drafter_yields_stocks_tokens(models: Path, tmp_path: Path) -> None:
    target = model(models, "llama", "bfloat16")
    own = {**FIXED, "drafters": ["ngram"], "max_draft_tokens": 24}
    spec_rollout = {**own, "speculative_config": drafting_with("draft_model", target, tmp_path / "draft")}
    requests = cases(16, VOCAB, seed=13, max_tokens=40)

    def both_drafted(ours: Engine) -> None:
        reached = ours.runner.model_drafter.acceptance._counts[0].sum(axis=1)
        assert (reached[:3] > 1.0).all(), "ngram, the model's chain and its alternatives"

    check_identity(target, "bfloat16", requests, num_drafters=0, spec_rollout=spec_rollout, inspect=both_drafted)


@pytest.mark.nightly
def test_a_model_drafts_for_requests_that_are_preempted_and_come_back(models: Path, tmp_path: Path) -> None:
    target = model(models, "llama", "float32")
    spec_rollout = {**FIXED, "speculative_config": drafting_with("eagle", target, tmp_path / "draft")}
    requests = cases(16, VOCAB, seed=15, max_tokens=60, only=("temperature 1", "greedy", "top_p", "n 3"))
    small = {"num_gpu_blocks_override": 28, "block_size": 32}
    check_identity(target, "float32", requests, num_drafters=0, spec_rollout=spec_rollout, **small)


def test_a_model_drafts_for_prompts_that_come_in_chunks_as_engines_are_shipped(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against our own engine without drafts: stock's stops with an error where a seeded prompt comes in chunks.

    Other tests set no limit on a drafter's time. Here one holds for ngram, and none ever does for a model.
    """
    monkeypatch.setenv(envs.STRICT, "0")
    target = model(models, "llama", "float32")
    own = {**FIXED, "drafters": ["ngram"], "max_draft_tokens": 24}
    spec_rollout = {**own, "speculative_config": drafting_with("eagle", target, tmp_path / "draft")}
    requests = cases(12, VOCAB, seed=15, max_tokens=40, only=("temperature 1", "greedy", "top_p", "n 3"))
    with engine(target, "float32", is_ours=True, spec_rollout=spec_rollout, max_num_batched_tokens=48) as ours:
        plain = run(ours.llm, requests, enabled=False)
        assert ours.runner.spec_rollout._asking.share == TIME_SHARE < math.inf
        drafted = run(ours.llm, requests)
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
        _, _, accepted = ours.runner.model_drafter.acceptance._counts
        assert accepted[1:3].sum() > 0.5, "of the model's own, behind ngram's"
    assert not stats["failures"]
    assert [list(o.outputs[0].token_ids) for o in drafted] == [list(o.outputs[0].token_ids) for o in plain]


def test_a_model_that_fails_between_two_drafts_is_left_alone_for_a_while(models: Path, tmp_path: Path) -> None:
    target = model(models, "llama", "float32")
    spec_rollout = {**FIXED, "speculative_config": drafting_with("eagle", target, tmp_path / "draft")}
    requests = cases(4, VOCAB, seed=16, max_tokens=30, only=("temperature 1", "greedy"))
    with engine(target, "float32", is_ours=True, spec_rollout=spec_rollout) as ours:
        plain = run(ours.llm, requests, enabled=False)
        speculator, drafter = ours.runner.spec_rollout, ours.runner.model_drafter
        speculator.guard.is_strict = False
        run_pass, passes = drafter.proposer._pass, []

        def fails_once(*args: Any) -> None:
            passes.append(args)
            if len(passes) == 3:
                raise RuntimeError("no memory left")
            run_pass(*args)

        drafter.proposer._pass = fails_once
        drafted = run(ours.llm, requests)
        assert speculator.guard.failures == {"drafter model": 1} and speculator.drafters == []
        while speculator.drafters == []:
            run(ours.llm, requests)
        before = drafter._times
        again = run(ours.llm, requests)
        assert ours.runner.model_drafter is drafter and drafter._times > before
        assert speculator.guard.failures == {"drafter model": 1}
    for found in (drafted, again):
        assert [list(o.outputs[0].token_ids) for o in found] == [list(o.outputs[0].token_ids) for o in plain]


def test_a_copy_of_the_target_is_met_at_every_position(models: Path, tmp_path: Path) -> None:
    """The same model, the same noise: whatever the temperature, each draft token is the target's own."""
    target = model(models, "llama", "float32")
    given = {"method": "draft_model", "model": target, "num_speculative_tokens": 4}
    with engine(target, "float32", is_ours=True, spec_rollout={**FIXED, "speculative_config": given}) as ours:
        ours.runner.model_drafter.coupling.pin(1.0, 1.0)
        params = [
            SamplingParams(temperature=t, seed=i, max_tokens=26, ignore_eos=True) for i, t in enumerate((0, 1, 2))
        ]
        prompts = [{"prompt_token_ids": [9 + i, 40, 41, 42 + i]} for i in range(3)]
        drafted = ours.llm.generate(prompts, params, use_tqdm=False)
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
        for one in params:
            one.extra_args = {"spec_rollout": {"enabled": False}}
        plain = ours.llm.generate(prompts, params, use_tqdm=False)
    # one token comes from the prompt's step, five from each other one
    assert stats["accepted"] == 3 * 20 and stats["steps"] == 6
    assert [list(o.outputs[0].token_ids) for o in drafted] == [list(o.outputs[0].token_ids) for o in plain]


@pytest.mark.nightly
def test_vllms_own_flag_beside_spec_rollout_names_the_model(models: Path, tmp_path: Path) -> None:
    target = model(models, "llama", "float32")
    given = drafting_with("draft_model", target, tmp_path / "draft")
    requests = cases(4, VOCAB, seed=14, max_tokens=20, only=("temperature 1", "min_p", "logit bias"))
    with engine(target, "float32", is_ours=False) as stock:
        truth = run(stock.llm, requests)
    llm = LLM(
        target,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        spec_rollout={"drafters": [], "budget": "fixed"},
        speculative_config=given,
    )
    try:
        drafted = run(llm, requests)
        (stats,) = llm.collective_rpc("spec_rollout_stats")
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert stats["accepted"] > 0
    # features that stock vLLM refuses beside its own speculation, min_p among them, stay usable
    assert [list(o.outputs[0].token_ids) for o in drafted] == [list(o.outputs[0].token_ids) for o in truth]
