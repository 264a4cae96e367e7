"""No budget remembers requests for ever that nobody told it the end of."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trees import batch_of, chain
from tests.unit.budgets.papers.builders import view
from vllm_specrollout.budgets.registry import make_budget, names
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.types import Answer, FinishReason, RequestBatch, StepRecord, VerifyResult


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
        trees = batch_of([chain([1, 2])], [f"r{number}"])
        accepted = np.asarray([1], np.int32)
        budget.observe(StepRecord(None, trees, VerifyResult(accepted, np.asarray([0], np.int32)), None, batch))
    kept = {key: len(value) for key, value in vars(budget).items() if isinstance(value, dict)}
    assert max(kept.values(), default=0) < 100, kept
