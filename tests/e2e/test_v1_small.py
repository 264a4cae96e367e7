"""One small engine on the V1 runner, in this process: what it leaves alone, when it asks again, what it survives."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.e2e.identity.engines import Engine, engine, model
from tests.e2e.pausing import GAPS, STEPS, Always, NeverPays
from tests.e2e.randomness import check_unseeded_requests_leave_randomness_alone
from vllm_specrollout.policies.budget import FixedBudget
from vllm_specrollout.types import Decision, DraftTree, Feedback, RequestView, StepTiming, chain

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = model(tmp_path_factory.mktemp("models"), "qwen3", "float32")
    with engine(path, "float32", is_ours=True) as one:
        yield one


def test_unseeded_requests_draw_nothing_from_the_processs_random_states(ours: Engine) -> None:
    check_unseeded_requests_leave_randomness_alone(ours)


def test_after_drafts_did_not_pay_drafters_are_asked_again_after_so_many_steps(ours: Engine) -> None:
    budget = NeverPays(lambda: ours.runner.stats.steps)
    ours.runner.speculation.policy, ours.runner.speculation.drafters = budget, [Always()]
    params = SamplingParams(seed=1, max_tokens=STEPS + 3, ignore_eos=True)
    ours.llm.generate([{"prompt_token_ids": [9, 40, 41]}], [params], use_tqdm=False)
    assert budget.gaps == GAPS


class Errs(Always):
    """Drafts soundly for some steps, and then what the function makes of it."""

    name = "errs"

    def __init__(self, fault: str) -> None:
        super().__init__([7, 8])
        self.fault, self.steps = fault, 0

    def propose(self, views: Sequence[RequestView], decisions: Sequence[Decision]) -> list[DraftTree]:
        self.steps += 1
        trees = super().propose(views, decisions)
        if self.steps < 6:
            return trees
        if self.fault == "raises":
            raise RuntimeError("out of ideas")
        if self.fault == "no tree":
            return [DraftTree(t.token_ids, t.parents[::-1].copy(), t.log_q * np.nan, t.source) for t in trees]
        return [chain([400_000] * tree.size) for tree in trees]


class Forgets(FixedBudget):
    """A budget that makes a mistake after some steps."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.steps = 0

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        self.steps += 1
        assert self.steps < 6, "one step too many"


@pytest.mark.parametrize("fault", ["raises", "no tree", "a token that the model does not have", "budget"])
def test_a_running_engine_survives_what_errs_and_yields_the_same_tokens(
    ours: Engine, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    speculation = ours.runner.speculation
    prompts = [{"prompt_token_ids": [9 + i, 40, 41]} for i in range(3)]
    params = [SamplingParams(seed=i, max_tokens=24, ignore_eos=True) for i in range(3)]
    speculation.policy, speculation.drafters = FixedBudget(4, 4), []
    plain = ours.llm.generate(prompts, params, use_tqdm=False)
    survivor = Always()
    speculation.drafters = [survivor] if fault == "budget" else [Errs(fault), survivor]
    speculation.policy = Forgets() if fault == "budget" else FixedBudget(4, 4)
    speculation.guard.is_strict, before = False, dict(speculation.guard.failures)
    try:
        with caplog.at_level(logging.ERROR, logger="vllm.specrollout"):
            drafted = ours.llm.generate(prompts, params, use_tqdm=False)
    finally:
        speculation.guard.is_strict = True
    assert [list(o.outputs[0].token_ids) for o in drafted] == [list(o.outputs[0].token_ids) for o in plain]
    (stats,) = ours.llm.collective_rpc("spec_rollout_stats", kwargs={"reset": True})
    part = "budget" if fault == "budget" else "drafter errs"
    assert stats["failures"] == {**before, part: before.get(part, 0) + 1} and stats["drafted"] > 0
    # named at the first failure only
    assert caplog.text.count(f"{part} failed") == (part not in before)
    assert speculation.drafters == [survivor]
