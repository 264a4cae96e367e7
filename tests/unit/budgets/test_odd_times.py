import math
from dataclasses import replace

import numpy as np
import pytest

from tests.drafters import nothing_accepted, requests_of
from tests.trees import batch_of, chain
from vllm_specrollout.budgets.registry import make_budget, names
from vllm_specrollout.budgets.step_cost import Asking, StepCost
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.types import StepRecord, StepTiming

ODD = [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300]
STEP = StepTiming(2, 6, 4, 0, 3, 10.0, True, trees=2, ask_ms=0.5)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("field", ["step_ms", "ask_ms"])
def test_a_budget_goes_on_after_any_time(name: str, field: str) -> None:
    budget = make_budget(SpecRolloutConfig(budget=name))
    batch = requests_of(2)
    for step in range(60):
        odd = step % 3 == 0
        timing = replace(STEP, rows=2 + step % 8, **({field: ODD[step // 3 % len(ODD)]} if odd else {}))
        limits = budget.limits(batch)
        trees = batch_of([chain([1, 2])] * 2, batch.request_ids)
        plan = budget.choose([trees], limits, batch, 0.1)
        assert np.isfinite(plan.expected_ms) and np.isfinite(plan.plain_ms)
        budget.observe(StepRecord(plan, plan.trees, nothing_accepted(2), timing, batch))


@pytest.mark.parametrize("odd", ODD[:5])
def test_an_odd_time_leaves_the_cost_of_a_step_as_it_was(odd: float) -> None:
    told, not_told = StepCost(), StepCost()
    for cost in (told, not_told):
        cost.observe(STEP)
    told.observe(replace(STEP, step_ms=odd))
    assert told.plain_ms(2) == not_told.plain_ms(2) and told.is_known


@pytest.mark.parametrize("odd", ODD[:5])
def test_an_odd_time_leaves_the_share_of_drafters_as_it_was(odd: float) -> None:
    asking = Asking(0.5)
    asking.passed(replace(STEP, ask_ms=0.0))
    asking.passed(replace(STEP, step_ms=odd))
    assert asking.limit_ms(2) == 5.0
