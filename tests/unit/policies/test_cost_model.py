"""The step cost: learns a line it is shown, and keeps its head."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.policies.cost_model import PRIOR, StepCost, features
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


def _bent(rng: np.random.Generator, batch: int, factor: float = 1.0) -> StepTiming:
    """A step of an engine that is bound by memory up to 16 rows and by arithmetic beyond."""
    nodes = int(rng.integers(0, 4)) * batch
    rows = batch + nodes
    ms = 12.0 + 0.1 * min(rows, 16) + 0.6 * max(rows - 16, 0) + 0.3 * (nodes > 0)
    return _step(rows, nodes, 0, factor * ms * float(np.exp(rng.normal(0.0, 0.03))))


def _errors(cost: StepCost, timings: list[StepTiming]) -> list[float]:
    """Relative errors of predictions, each made before its step is learned."""
    found = []
    for timing in timings:
        trees = timing.batch if timing.nodes else 0
        predicted = cost.predict(timing.rows, timing.nodes, batch=timing.batch, trees=trees)
        found.append(abs(predicted - timing.step_ms) / timing.step_ms)
        cost.observe(timing)
    return found


def test_a_bent_line_is_known_after_two_hundred_steps_of_a_shrinking_batch() -> None:
    rng, cost = np.random.default_rng(1), StepCost()
    errors = _errors(cost, [_bent(rng, max(1, 48 - step // 4)) for step in range(300)])
    assert np.median(errors[200:]) < 0.08
    assert cost.error < 0.08
    assert cost.row_at(60) > 3.0 * cost.row_at(4)


@pytest.mark.parametrize("factor", [0.4, 1.3, 3.0])
def test_an_engine_that_changes_is_known_again_within_fifty_steps(factor: float) -> None:
    rng, cost = np.random.default_rng(2), StepCost()
    for step in range(200):
        cost.observe(_bent(rng, 1 + step % 24))
    errors = _errors(cost, [_bent(rng, 1 + step % 24, factor) for step in range(100)])
    assert np.median(errors[50:]) < 0.15
    assert np.median(errors[:50]) < 0.15


def test_more_work_never_costs_less() -> None:
    rng, cost = np.random.default_rng(3), StepCost()
    for _ in range(300):
        rows = int(rng.integers(1, 300))
        cost.observe(_step(rows, int(rng.integers(0, rows)), 0, float(rng.uniform(1.0, 50.0))))
    assert (np.diff(cost.added_rows(1, 4000)) > 0.0).all()


def test_added_rows_are_differences_of_predictions() -> None:
    rng, cost = np.random.default_rng(4), StepCost()
    for step in range(200):
        cost.observe(_bent(rng, 1 + step % 24))
    whole = [cost.predict(rows, batch=3) - cost.predict(3, batch=3) for rows in (3, 4, 20, 700, 5000)]
    assert cost.added_rows(3, 4997)[[0, 1, 17, 697, 4997]] == pytest.approx(whole)


def test_a_profile_is_where_learning_starts() -> None:
    rng, cost = np.random.default_rng(5), StepCost()
    cost.seed([_bent(rng, 1 + step % 40) for step in range(200)])
    errors = _errors(cost, [_bent(rng, 30) for _ in range(10)])
    assert np.median(errors) < 0.08
    # what the profile knew of small batches stays known, whatever large ones teach
    for _ in range(200):
        cost.observe(_bent(rng, 40))
    assert cost.predict(1) == pytest.approx(12.1, rel=0.15)


def test_it_says_how_sure_it_is() -> None:
    rng, cost = np.random.default_rng(6), StepCost()
    for _ in range(256):
        cost.observe(_bent(rng, 4))
    near, far = cost.spread(8, 4) / cost.predict(8, 4), cost.spread(512) / cost.predict(512)
    assert 0.0 < near < 0.12
    assert far > 2.0 * near


@given(st.integers(1, 3000), st.integers(1, 64), st.integers(0, 40), st.integers(0, 8), st.integers(0, 9000))
def test_a_step_is_predicted_by_its_terms(rows: int, batch: int, nodes: int, branches: int, context: int) -> None:
    cost = StepCost()
    for ms in (5.0, 5.2, 4.9, 5.1, 5.0):
        cost.observe(StepTiming(4, 4, 0, 0, 4, ms, True))
    trees = min(nodes, batch)
    terms = features(rows, batch, nodes, trees, branches, context) @ cost._terms
    told = cost.predict(rows, nodes, branches, batch=batch, trees=trees, context=context)
    assert told == pytest.approx(float(terms))
    added = cost.added_rows(batch, nodes)
    assert added[-1] == pytest.approx(
        cost.predict(batch + nodes, batch=batch) - cost.predict(batch, batch=batch), abs=1e-9
    )
