from dataclasses import replace

import numpy as np
import pytest

from tests.unit.budgets.papers.builders import step, view
from vllm_specrollout.budgets.registry import make_budget, names
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.types import Answer, FinishReason, RequestBatch


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("is_told", [True, False])
def test_requests_whose_last_step_comes_home_after_their_end_leave_nothing(name: str, is_told: bool) -> None:
    budget = make_budget(SpecRolloutConfig(budget=name))
    nothing = np.zeros(0, np.int32)
    for number in range(400):
        batch = RequestBatch.of([view(f"r{number}")])
        budget.limits(batch)
        if is_told:
            budget.finish(Answer(f"r{number}", "p", nothing, nothing, FinishReason.FINISHED, 0))
        budget.observe(replace(step([2], [1], names=batch.request_ids), batch=batch))
    kept = {key: len(value) for key, value in vars(budget).items() if isinstance(value, dict)}
    assert max(kept.values(), default=0) < 100, kept
