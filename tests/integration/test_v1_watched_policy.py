"""What a benchmark counts of a budget, also in the steps that it rests through."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_specrollout.policies.budget import FixedBudget
from vllm_specrollout.policies.off import OffBudget
from vllm_specrollout.types import RequestView
from vllm_specrollout.worker.tuning import WatchedPolicy


def test_a_step_rested_through_counts_as_one_that_was_decided_to_be_off() -> None:
    resting, decided = WatchedPolicy(OffBudget()), WatchedPolicy(OffBudget())
    for _ in range(3):
        assert resting.rests(1)
        decided.decide([RequestView("r", np.zeros(8, np.int32), 4, 100)])
    assert (
        resting.start_over()
        == decided.start_over()
        == {
            "steps_on": 0,
            "steps_off": 3,
            "switches": 0,
            "mind_changes": 0,
        }
    )


def test_a_budget_that_cannot_rest_counts_nothing_when_asked_to() -> None:
    watched = WatchedPolicy(FixedBudget(4, 4))
    assert not watched.rests(1)
    assert set(watched.start_over().values()) == {0}
