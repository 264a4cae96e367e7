"""One small engine on the V2 runner, scheduled ahead: when it asks for drafts again, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.e2e.identity.engines import Engine, engine
from tests.e2e.pausing import GAPS, STEPS, Always, NeverPays
from tests.e2e.randomness import check_rollouts_leave_randomness_alone
from tests.v2.models import small_model
from vllm_specrollout.budgets.base import LONGEST_PAUSE, Backoff, Budget
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.drafters.base import Drafter
from vllm_specrollout.speculator import Speculator


@pytest.fixture
def ours(tmp_path: Path, ahead: None) -> Iterator[Engine]:
    path = small_model(tmp_path, "qwen3", "float32")
    with engine(path, "float32", is_ours=True, max_num_seqs=4, max_model_len=320) as one:
        yield one


def _answer(ours: Engine, max_tokens: int) -> None:
    params = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
    ours.llm.generate([{"prompt_token_ids": [9, 40, 41]}], [params], use_tqdm=False)


def _start(speculator: Speculator, budget: Budget, drafter: Drafter) -> None:
    speculator.budget, speculator.backoff = budget, Backoff()
    speculator.replace_drafters([drafter])


@pytest.mark.nightly
def test_pauses_are_those_of_the_v1_runner_and_end_with_the_run(ours: Engine) -> None:
    runner = ours.runner
    check_rollouts_leave_randomness_alone(ours)
    # what does not pay: asked again after as many engine steps as on the V1 runner
    budget = NeverPays(lambda: runner.step.number)
    _start(runner.spec_rollout, budget, Always())
    _answer(ours, STEPS + 3)
    assert budget.gaps == GAPS
    # what is not there: nobody waits for tokens to draft from, for longer and longer
    fixed = FixedBudget(4, 4)
    fixed.backs_off = True
    _start(runner.spec_rollout, fixed, Always([]))
    ours.llm.collective_rpc("spec_rollout_stats", kwargs={"reset": True})
    _answer(ours, 60)
    # statistics that are reset meanwhile set nobody's clock back
    (stats,) = ours.llm.collective_rpc("spec_rollout_stats", kwargs={"reset": True})
    assert stats["drafted"] == 0 and stats["failures"] == {}
    runner.spec_rollout.replace_drafters([Always()])
    _answer(ours, LONGEST_PAUSE + 8)
    (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    assert stats["drafted"] > 0
