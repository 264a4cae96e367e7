"""The default budget keeps up with the best fixed width, on rollouts that differ in cost, batch and acceptance."""

import pytest

from bench.replay.synthetic import make_trace
from tests.unit.replay.gate import PLANS
from vllm_specrollout.budgets.base import Budget
from vllm_specrollout.budgets.fixed import FixedBudget, OffBudget
from vllm_specrollout.budgets.goodput import GoodputBudget
from vllm_specrollout.replay.simulate import replay

WIDTHS = (1, 2, 4, 8)
# those that take least time to replay, of each kind
SUBSET = (
    "gpu b48 .55",
    "gpu-7b b16 tree",
    "gpu-32b b32 .9",
    "eager b32 .5",
    "cpu b16 tail",
    "cpu b32 boast",
    "cpu-small b8 boast",
    "cpu-small b4 .9",
)


@pytest.mark.parametrize("name", SUBSET)
def test_auto_is_within_two_percent_of_the_best_fixed_width(name: str) -> None:
    trace = make_trace(PLANS[name])
    most, depth = trace.header.max_draft_tokens, trace.header.max_depth
    others: list[Budget] = [OffBudget(), *(FixedBudget(width, min(width, depth)) for width in WIDTHS)]
    best = min(replay(trace, budget).makespan_ms for budget in others)
    assert best / replay(trace, GoodputBudget(most, depth)).makespan_ms >= 0.98
