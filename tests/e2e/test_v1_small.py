"""One small engine on the V1 runner, in this process: what it leaves alone, when it asks again, what it survives."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.e2e.identity.engines import Engine, engine, model
from tests.e2e.pausing import GAPS, STEPS, Always, NeverPays
from tests.e2e.randomness import check_rollouts_leave_randomness_alone
from vllm_specrollout.budgets.base import Backoff
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.observe.probation import Probation
from vllm_specrollout.types import DraftLimits, RequestBatch, StepRecord, TreeBatch


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = model(tmp_path_factory.mktemp("models"), "qwen3", "float32")
    with engine(path, "float32", is_ours=True) as one:
        yield one


def test_a_rollout_draws_nothing_from_the_processs_random_states(ours: Engine) -> None:
    check_rollouts_leave_randomness_alone(ours)


def test_after_drafts_did_not_pay_drafters_are_asked_again_after_so_many_steps(ours: Engine) -> None:
    budget = NeverPays(lambda: ours.runner.stats.steps)
    speculator = ours.runner.spec_rollout
    speculator.budget, speculator.backoff = budget, Backoff()
    speculator.replace_drafters([Always()])
    params = SamplingParams(seed=1, max_tokens=STEPS + 3, ignore_eos=True)
    ours.llm.generate([{"prompt_token_ids": [9, 40, 41]}], [params], use_tqdm=False)
    assert budget.gaps == GAPS


class Errs(Always):
    """Drafts soundly for some steps, and then what the function makes of it."""

    name = "errs"

    def __init__(self, fault: str) -> None:
        super().__init__([7, 8])
        self.fault, self.steps = fault, 0

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        self.steps += 1
        trees = super().propose(batch, limits)
        if self.steps < 6:
            return trees
        if self.fault == "raises":
            raise RuntimeError("out of ideas")
        if self.fault == "no tree":
            return replace(trees, parents=trees.parents[::-1].copy(), log_q=trees.log_q * np.nan)
        return replace(trees, token_ids=np.full_like(trees.token_ids, 400_000))


class Forgets(FixedBudget):
    """A budget that makes a mistake after some steps."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.steps = 0

    def observe(self, record: StepRecord) -> None:
        self.steps += 1
        assert self.steps < 6, "one step too many"


@pytest.mark.parametrize("fault", ["raises", "no tree", "a token that the model does not have", "budget"])
def test_a_running_engine_survives_what_errs_and_yields_the_same_tokens(
    ours: Engine, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    speculator = ours.runner.spec_rollout
    prompts = [{"prompt_token_ids": [9 + i, 40, 41]} for i in range(3)]
    params = [SamplingParams(seed=i, max_tokens=24, ignore_eos=True) for i in range(3)]
    speculator.budget, speculator.backoff = FixedBudget(4, 4), Backoff()
    speculator.replace_drafters([])
    plain = ours.llm.generate(prompts, params, use_tqdm=False)
    survivor = Always()
    speculator.replace_drafters([survivor] if fault == "budget" else [Errs(fault), survivor])
    speculator.backoff = Backoff()
    speculator.budget = Forgets() if fault == "budget" else FixedBudget(4, 4)
    speculator.guard.is_strict, before = False, dict(speculator.guard.failures)
    try:
        with caplog.at_level(logging.ERROR, logger="vllm.specrollout"):
            drafted = ours.llm.generate(prompts, params, use_tqdm=False)
    finally:
        speculator.guard.is_strict = True
        # it would be tried again in a later test
        speculator.budget, speculator.probation = FixedBudget(4, 4), Probation()
    assert [list(o.outputs[0].token_ids) for o in drafted] == [list(o.outputs[0].token_ids) for o in plain]
    (stats,) = ours.llm.collective_rpc("spec_rollout_stats", kwargs={"reset": True})
    part = "budget" if fault == "budget" else "drafter errs"
    assert stats["failures"] == {**before, part: before.get(part, 0) + 1} and stats["drafted"] > 0
    # named at the first failure only
    assert caplog.text.count(f"{part} failed") == (part not in before)
    assert speculator.drafters == [survivor]
