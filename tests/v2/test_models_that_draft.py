"""The very tokens of stock vLLM where a model drafts on the V2 runner: vLLM's own speculators, sound and broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm_specrollout.bench.policy import CHECKPOINT
from vllm_specrollout.kernels.draft_choice.naive import MODELLED

import vllm_specrollout
from tests.e2e.drafting_models import copied, drafting_with, perturbed, with_own_layers
from tests.e2e.identity.cases import Case, cases
from tests.e2e.identity.check import VOCAB, check_identity
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import Engine, engine
from tests.e2e.short_context import with_context
from tests.v2.models import small_model as model
from tests.v2.test_identity import ENGINE, FEATURES
from vllm_specrollout.config import envs
from vllm_specrollout.worker.v2 import model as drafting

POLICY = CHECKPOINT.parent
SAMPLED = ("temperature 1", "greedy", "top_p")
FIXED = {"drafters": [], "budget": "fixed", "max_draft_tokens": 6, "max_depth": 3}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def settings(kind: str, target: str, folder: Path, **more: Any) -> dict[str, Any]:
    given = {**drafting_with(kind, target, folder / "draft"), "num_speculative_tokens": 3}
    return {**FIXED, "speculative_config": given, **more}


def _asked_the_model(ours: Engine) -> None:
    assert ours.runner.model_drafter is not None
    assert (ours.runner.drafts.kinds == MODELLED).any(), "its drafts are taken"


@pytest.mark.parametrize(
    "kind", ["draft_model", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("eagle", "eagle3", "dflash"))]
)
def test_a_model_drafts_and_the_tokens_are_stocks(models: Path, tmp_path: Path, kind: str) -> None:
    target = model(models, "llama", "float32") if kind not in ("eagle3", "dflash") else deeper(models)
    # every feature beside the one that is accepted often; an interpreter takes its time
    count, features = (8, FEATURES) if kind == "draft_model" else (3, SAMPLED)
    requests = cases(count, VOCAB, seed=21, max_tokens=6, only=features)
    own = settings(kind, target, tmp_path)
    check_identity(
        target, "float32", requests, num_drafters=0, spec_rollout=own, inspect=_asked_the_model,
        must_accept=kind == "draft_model", **ENGINE
    )  # fmt: skip


def test_a_trained_head_is_accepted_beside_history_and_the_tokens_are_stocks(ahead: None) -> None:
    given = {"method": "eagle3", "model": str(POLICY / "head"), "num_speculative_tokens": 3}
    own = {"budget": "fixed", "max_draft_tokens": 6, "max_depth": 6, "speculative_config": given}
    prompts = ["12+34=", "7*8+5=", "99-45="]
    params = [SamplingParams(seed=i, temperature=t, max_tokens=24) for i, t in enumerate((0.0, 1.0, 1.0))]

    def ask(one: Engine) -> list[list[int]]:
        return [list(out.outputs[0].token_ids) for out in one.llm.generate(prompts, params, use_tqdm=False)]

    with engine(str(POLICY / "checkpoint"), "float32", is_ours=False, **ENGINE) as stock:
        truth = ask(stock)
    with engine(
        str(POLICY / "checkpoint"), "float32", is_ours=True, spec_rollout={**own, "drafters": []}, **ENGINE
    ) as ours:
        assert ask(ours) == truth
        _asked_the_model(ours)
        ours.runner.settle()
        alone = ours.runner.stats.accepted
    own["drafters"] = ["history"]
    with engine(str(POLICY / "checkpoint"), "float32", is_ours=True, spec_rollout=own, **ENGINE) as ours:
        assert ask(ours) == truth
        # an answer of the last epoch is the very answer of this one
        ours.llm.collective_rpc("spec_rollout_stats", args=(True,))
        assert ask(ours) == truth
        ours.runner.settle()
        assert ours.runner.stats.accepted > alone > 0


def test_layers_of_the_targets_own_draft_and_the_tokens_are_stocks(models: Path, tmp_path: Path) -> None:
    target = with_own_layers(model(models, "llama", "float32"), tmp_path / "target")
    own = {**FIXED, "speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
    requests = cases(2, VOCAB, seed=22, max_tokens=5, only=SAMPLED)
    check_identity(
        target, "float32", requests, num_drafters=0, spec_rollout=own, inspect=_asked_the_model, must_accept=False,
        **ENGINE
    )  # fmt: skip


@pytest.mark.nightly
def test_a_broken_model_beside_a_drafter_costs_speed_and_nothing_else(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.STRICT, "0")  # it is named after some steps
    target = model(models, "llama", "float32")
    own = settings("nan", target, tmp_path, drafters=["ngram"])
    requests = cases(3, VOCAB, seed=23, max_tokens=8, only=SAMPLED)
    check_identity(
        target, "float32", requests, num_drafters=0, spec_rollout=own, inspect=_asked_the_model, must_accept=False,
        **ENGINE
    )  # fmt: skip


@pytest.mark.nightly
def test_a_model_drafts_for_preempted_requests_with_steps_scheduled_ahead(
    models: Path, tmp_path: Path, ahead: None
) -> None:
    """Too few blocks for all, and prompts in chunks: requests leave their rows, and others come into them."""
    target = model(models, "llama", "float32")
    own = settings("draft_model", target, tmp_path)
    requests = [
        Case("pressure", str(i), list(range(5 + i, 55 + i)), {"max_tokens": 12, "seed": i, "ignore_eos": True})
        for i in range(5)
    ]
    scarce = {"max_model_len": 128, "block_size": 32, "num_gpu_blocks_override": 9, "max_num_seqs": 5}
    check_identity(
        target, "float32", requests, num_drafters=0, spec_rollout=own, inspect=_asked_the_model,
        enable_prefix_caching=False, max_num_batched_tokens=64, **scarce
    )  # fmt: skip


def test_swaps_between_all_steps_change_no_token(models: Path, tmp_path: Path) -> None:
    target = model(models, "llama", "float32")
    own = settings("draft_model", target, tmp_path)
    path = own["speculative_config"]["model"]
    requests = cases(3, VOCAB, seed=24, max_tokens=6, only=SAMPLED)
    with engine(target, "float32", is_ours=True, spec_rollout=own, **ENGINE) as ours:
        plain = run(ours.llm, requests, enabled=False)
        core, found, swaps = ours.llm.llm_engine, {}, 0
        for i, case in enumerate(requests):
            core.add_request(str(i), {"prompt_token_ids": case.prompt}, case.sampling())
        while core.has_unfinished_requests():
            found |= {out.request_id: list(out.outputs[0].token_ids) for out in core.step() if out.finished}
            # the target itself, and the perturbed one again
            swaps += 1
            assert vllm_specrollout.load_drafter(ours.llm, (target, path)[swaps % 2]) == swaps
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    assert [found[str(i)] for i in range(3)] == [list(out.outputs[0].token_ids) for out in plain]
    assert stats["accepted"] > 0


@pytest.mark.nightly
def test_a_worse_model_goes_back_between_two_steps_and_the_tokens_are_stocks(
    models: Path, tmp_path: Path, ahead: None
) -> None:
    target = model(models, "llama", "float32")
    own = settings("draft_model", target, tmp_path)
    own["speculative_config"]["model"] = perturbed(target, tmp_path / "good", 0.0)
    bad = copied(target, tmp_path / "bad", lambda weight: weight.flip(0) * 1e-3)
    params = {"max_tokens": 20, "ignore_eos": True, "temperature": 0}
    requests = [Case("greedy", str(i), [5 + i, 7, 9 + i], params) for i in range(8)]
    with engine(target, "float32", is_ours=True, spec_rollout=own, **ENGINE) as ours:
        heads = ours.runner.model_drafter.heads
        rollouts = [run(ours.llm, requests, enabled=False), run(ours.llm, requests)]
        assert vllm_specrollout.load_drafter(ours.llm, bad) == 1
        ours.llm.reset_prefix_cache()
        rollouts.append(run(ours.llm, requests))
        ours.runner.settle()
        assert (heads.number, heads.went_back, ours.runner.swapper._before) == (0, 1, None)
        ours.llm.reset_prefix_cache()
        ours.llm.collective_rpc("spec_rollout_stats", args=(True,))
        rollouts.append(run(ours.llm, requests))
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    plain, *others = [[list(out.outputs[0].token_ids) for out in outputs] for outputs in rollouts]
    assert others == [plain] * 3
    assert stats["accepted"] > 0.7 * stats["drafted"]


@pytest.mark.parametrize("limit", ["the user's", pytest.param("the model's own", marks=pytest.mark.nightly)])
def test_nothing_is_taken_of_what_a_model_drafts_behind_its_context(models: Path, tmp_path: Path, limit: str) -> None:
    target = model(models, "llama", "float32")
    own = settings("draft_model", target, tmp_path, max_draft_tokens=3)
    own["speculative_config"]["model"] = perturbed(target, tmp_path / "copy", 0.0)
    context = 32 if limit == "the user's" else 96
    if limit == "the user's":
        own["speculative_config"]["max_model_len"] = context
    else:
        with_context(own["speculative_config"]["model"], context)
    params = {"max_tokens": context, "seed": 1, "ignore_eos": True, "temperature": 0}
    requests = [Case("long", str(i), list(range(5 + i, 5 + i + context // 2)), params) for i in range(2)]
    drafted: list[tuple[int, int]] = []
    with engine(target, "float32", is_ours=True, spec_rollout=own, **ENGINE) as ours:
        plain = run(ours.llm, requests, enabled=False)
        runner, stock = ours.runner, ours.runner.host.plan

        def noted(step: Any) -> Any:
            drafted.extend(
                (request.length, int(size))
                for request, size in zip(step.requests, step.trees.sizes, strict=True)
                if request is not None
            )
            return stock(step)

        runner.host.plan = noted
        got = run(ours.llm, requests)
        runner.settle()
        assert runner.stats.accepted > 0
    assert [list(o.outputs[0].token_ids) for o in got] == [list(o.outputs[0].token_ids) for o in plain]
    assert max(length for length, size in drafted if size) < context < max(length for length, _ in drafted)


def test_a_model_of_another_shape_drafts_beside_a_drafter_and_the_tokens_are_stocks(models: Path) -> None:
    """Its keys and values are wider than the target's: vLLM keeps both in one group of the KV cache."""
    from vllm_specrollout.bench.policy.random_model import make_random_model

    target = model(models, "llama", "float32")
    make_random_model(models / "wider", arch="llama", size="3M", num_layers=1, dtype="float32", seed=8)
    given = {"method": "draft_model", "model": str(models / "wider"), "num_speculative_tokens": 2}
    own = {**FIXED, "drafters": ["ngram"], "speculative_config": given}
    requests = cases(2, VOCAB, seed=25, max_tokens=6, only=SAMPLED)

    check_identity(
        target, "float32", requests, num_drafters=0, spec_rollout=own, inspect=_asked_the_model, must_accept=False,
        **ENGINE
    )  # fmt: skip


def deeper(models: Path) -> str:
    """A target with as many layers as an EAGLE-3 head takes."""
    from vllm_specrollout.bench.policy.random_model import make_random_model

    path = models / "deeper"
    if not path.exists():
        make_random_model(path, arch="llama", size="1M", num_layers=4, dtype="float32", seed=7)
    return str(path)


def test_a_copy_of_the_target_is_met_at_every_position_with_steps_scheduled_ahead(models: Path, ahead: None) -> None:
    """The same model, the same noise: whatever the temperature, each draft token is the target's own."""
    target = model(models, "llama", "float32")
    given = {"method": "draft_model", "model": target, "num_speculative_tokens": 4}
    own = {**FIXED, "max_depth": 4, "max_draft_tokens": 8, "speculative_config": given}
    with engine(target, "float32", is_ours=True, spec_rollout=own, **ENGINE) as ours:
        ours.runner.model_drafter.coupling.pin(1.0, 1.0)
        params = [
            SamplingParams(temperature=t, seed=i, max_tokens=11, ignore_eos=True) for i, t in enumerate((0, 1, 2))
        ]
        prompts = [{"prompt_token_ids": [9 + i, 40, 41, 42 + i]} for i in range(3)]
        ours.llm.generate(prompts, params, use_tqdm=False)
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    assert stats["accepted"] == stats["drafted"] >= 3 * 8


def test_the_weights_of_a_copys_noise_are_learned_on_the_device(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = model(models, "llama", "float32")
    given = {"method": "draft_model", "model": target, "num_speculative_tokens": 3}
    own = {**FIXED, "max_depth": 3, "max_draft_tokens": 3, "speculative_config": given}
    monkeypatch.setattr(drafting, "WATCHED_EVERY", 2)
    with engine(target, "float32", is_ours=True, spec_rollout=own, **ENGINE) as ours:
        params = [
            SamplingParams(temperature=t, seed=i, max_tokens=24, ignore_eos=True) for i, t in enumerate((1, 2, 0))
        ]
        prompts = [{"prompt_token_ids": [9 + i, 40, 41, 42 + i]} for i in range(3)]
        before = ours.runner.model_drafter.coupling.sampled
        ours.llm.generate(prompts, params, use_tqdm=False)
        after = ours.runner.model_drafter.coupling.sampled
        ours.runner.settle()
        assert ours.runner.stats.accepted > 0
    # it is known ever better that both count the same
    assert after[0] > before[0] and after[1] / after[0] > before[1] / before[0] + 0.1
