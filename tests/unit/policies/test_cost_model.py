"""The step cost: learns a line it is shown, and keeps its head."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specrollout.policies.cost_model import PRIOR, StepCost
from vllm_specrollout.types import StepTiming


def _step(rows: int, nodes: int, branches: int, ms: float, is_decode_only: bool = True) -> StepTiming:
    return StepTiming(rows - nodes, rows, nodes, branches, rows - nodes, ms, is_decode_only)


def _shown(fixed: float, row: float, draft: float, branch: float, steps: int = 400) -> StepCost:
    rng, cost = np.random.default_rng(0), StepCost()
    for _ in range(steps):
        batch = int(rng.integers(1, 9))
        nodes, branches = (int(rng.integers(1, 40)), int(rng.integers(0, 6))) if rng.random() < 0.7 else (0, 0)
        ms = fixed + row * (batch + nodes) + draft * (nodes > 0) + branch * branches
        cost.observe(_step(batch + nodes, nodes, branches, ms * float(rng.normal(1.0, 0.02))))
    return cost


@pytest.mark.parametrize("scale", [0.2, 1.0, 50.0])
def test_the_line_is_found_whatever_its_scale(scale: float) -> None:
    cost = _shown(14.0 * scale, 0.35 * scale, 0.4 * scale, 0.3 * scale)
    assert cost.predict(1) == pytest.approx(14.35 * scale, rel=0.05)
    assert cost.predict(33, 32, 5) == pytest.approx(27.45 * scale, rel=0.05)
    assert cost.row_at(20) == pytest.approx(0.35 * scale, rel=0.15)


def test_a_disturbed_step_is_not_believed() -> None:
    cost = _shown(14.0, 0.35, 0.4, 0.3)
    before = cost.predict(8)
    for _ in range(5):
        cost.observe(_step(8, 0, 0, 900.0))
    assert cost.predict(8) == before


def test_steps_with_prompt_tokens_are_left_out() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe(_step(500, 0, 0, 80.0, is_decode_only=False))
    assert not cost.is_fitted


def test_terms_never_turn_negative() -> None:
    cost = StepCost()
    for rows in [1, 30, 1, 30, 1, 30, 1, 30] * 8:  # falls with rows, as noise may have it
        cost.observe(_step(rows, rows - 1, 0, 20.0 - 0.1 * rows))
    assert min(cost.fixed, cost.row_at(1), cost.row_at(20), cost.draft, cost.branch) > 0.0


def test_before_anything_is_seen_the_proportions_are_the_prior() -> None:
    cost = StepCost()
    assert cost.fixed == 1.0
    assert cost.predict(9, 8, 2) == pytest.approx(
        1.0 + 9 * PRIOR[1] + cost.request + cost.draft + cost.tree + 2 * cost.branch
    )
