"""One small engine on the V2 runner, scheduled ahead: when it asks for drafts again, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams

from tests.e2e.identity.engines import Engine, engine
from tests.e2e.pausing import GAPS, STEPS, NeverPays
from tests.e2e.randomness import check_rollouts_leave_randomness_alone
from tests.v2.models import small_model
from vllm_specrollout.budgets.base import LONGEST_PAUSE, Backoff, Budget
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.worker.v2.told import Asked


@pytest.fixture
def ours(tmp_path: Path, ahead: None) -> Iterator[Engine]:
    path = small_model(tmp_path, "qwen3", "float32")
    with engine(path, "float32", is_ours=True, max_num_seqs=4, max_model_len=320) as one:
        yield one


def _answer(ours: Engine, max_tokens: int) -> None:
    params = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
    ours.llm.generate([{"prompt_token_ids": [9, 40, 41]}], [params], use_tqdm=False)


def _start(runner: Any, budget: Budget, tokens: Sequence[int]) -> None:
    """Have these tokens drafted for everybody in each step."""
    runner.spec_rollout.budget, runner.spec_rollout.backoff = budget, Backoff()

    def look_up(batch: Any, asked: Asked, on_device: Any) -> tuple[torch.Tensor, ...]:
        drafted = torch.full((len(asked.rows), runner.drafts.width), -1, dtype=torch.int32)
        drafted[:, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        chain = torch.arange(-1, runner.drafts.width - 1, dtype=torch.int32).repeat(len(asked.rows), 1)
        return drafted, chain, torch.full(drafted.shape, 0.5)

    runner.drafts.look_up = look_up


@pytest.mark.nightly
def test_pauses_are_those_of_the_v1_runner_and_end_with_the_run(ours: Engine) -> None:
    runner = ours.runner
    check_rollouts_leave_randomness_alone(ours)
    # what does not pay: asked again after as many engine steps as on the V1 runner
    budget = NeverPays(lambda: runner.step.number)
    _start(runner, budget, [7, 8])
    _answer(ours, STEPS + 3)
    assert budget.gaps == GAPS
    # what is not there: nobody waits for tokens to draft from, for longer and longer
    fixed = FixedBudget(4, 4)
    fixed.backs_off = True
    _start(runner, fixed, [])
    ours.llm.collective_rpc("spec_rollout_stats", kwargs={"reset": True})
    _answer(ours, 60)
    # statistics that are reset meanwhile set nobody's clock back
    (stats,) = ours.llm.collective_rpc("spec_rollout_stats", kwargs={"reset": True})
    assert stats["drafted"] == 0 and stats["failures"] == {}
    _start(runner, fixed, [7, 8])
    _answer(ours, LONGEST_PAUSE + 8)
    (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    assert stats["drafted"] > 0
