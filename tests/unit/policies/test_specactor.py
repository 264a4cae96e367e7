"""SpecActor, coupled: the window that maximises tokens per millisecond, re-planned rarely, and own windows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.policies.builders import feedback, timing, view, views
from vllm_specrollout.policies.specactor import SpecActorBudget, tokens_per_step
from vllm_specrollout.types import Ending, Shape, Status, chain

_NONE = np.zeros(0, np.int32)


class _Line:
    """A cost model with known terms."""

    def __init__(self, fixed: float, row: float) -> None:
        self._fixed, self._row = fixed, row

    def predict(self, rows: int, nodes: int = 0, branches: int = 0) -> float:
        return self._fixed + self._row * rows

    def observe(self, timing: object) -> None:
        """It knows already."""


def _specactor(fixed: float = 10.0, row: float = 0.1, **kwargs: float) -> SpecActorBudget:
    budget = SpecActorBudget(24, 16, **kwargs)
    budget.cost = _Line(fixed, row)  # type: ignore[assignment]
    return budget


@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("w", [1, 3, 8])
def test_expected_tokens_are_the_sum_over_the_papers_distribution(p: float, w: int) -> None:
    chances = [p**a * (1.0 - p) for a in range(w)] + [p**w]
    assert sum(chances) == pytest.approx(1.0)
    assert tokens_per_step(p, w) == pytest.approx(sum(chance * (a + 1) for a, chance in enumerate(chances)))


@pytest.mark.parametrize("p", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("draft_ms", [0.0, 1.0])
def test_the_window_is_the_best_of_all(p: float, batch: int, draft_ms: float) -> None:
    budget = _specactor(draft_ms=draft_ms)
    speeds = [tokens_per_step(p, w) / (w * draft_ms + 10.0 + 0.1 * batch * (w + 1)) for w in range(1, 17)]
    assert budget.best_window(p, batch) == 1 + int(np.argmax(speeds))


def test_windows_shrink_with_the_batch_and_with_the_cost_of_drafting() -> None:
    free, dear = _specactor(), _specactor(draft_ms=3.0)
    windows = [free.best_window(0.8, batch) for batch in (1, 8, 64, 512)]
    assert windows == sorted(windows, reverse=True) and windows[0] > windows[-1] == 1
    assert dear.best_window(0.8, 8) < free.best_window(0.8, 8)


def test_the_plan_holds_for_1000_tokens() -> None:
    budget = _specactor()
    first = budget.decide(views(64))[0].max_nodes
    budget.observe([feedback(4, 0, "r0")] * 50, timing(64, 0, 10.0, tokens=999))
    assert budget.decide(views(64))[0].max_nodes == first > 1
    budget.observe([], timing(64, 0, 10.0, tokens=1))
    assert budget.decide(views(64))[1].max_nodes == budget.window == 1


def test_requests_below_the_average_get_a_window_of_their_own_planned_for_a_batch_of_one() -> None:
    budget = _specactor(row=0.5)
    for _ in range(40):
        budget.observe([feedback(8, 8, "r0"), feedback(8, 0, "r1")], None)
    budget.replan(["r0", "r1"])
    assert set(budget.own) == {"r1"}
    assert budget.own["r1"] == budget.best_window(budget.acceptance_of("r1"), 1)
    assert budget.window == budget.best_window(budget.acceptance, 2)
    assert [d.max_nodes for d in budget.decide(views(2))] == [budget.window, budget.own["r1"]]


def test_acceptance_counts_the_tokens_the_target_reached() -> None:
    budget = _specactor()
    for _ in range(2000):
        budget.observe([feedback(8, 3)], None)
    assert budget.acceptance == pytest.approx(0.75, abs=0.01)


def test_what_a_request_left_ends_with_it() -> None:
    budget = _specactor()
    budget.observe([feedback(8, 8, "a"), feedback(8, 0, "b")], None)
    budget.replan(["a", "b"])
    assert "b" in budget.own
    budget.finish(Ending("b", "", _NONE, _NONE, Status.FINISHED))
    assert "b" not in budget.own and "b" not in budget._requests


def test_drafts_are_chains_within_the_engines_limits() -> None:
    budget = SpecActorBudget(24, 5)
    budget.cost = _Line(1000.0, 0.001)  # type: ignore[assignment]
    decision = budget.decide([view()])[0]
    assert (decision.shape, decision.max_nodes) == (Shape.CHAIN, 5)
    assert budget.choose([chain([1, 2, 3])], [decision])[0].size == 3


def test_it_says_what_it_expects() -> None:
    budget = _specactor(fixed=10.0, row=0.1)
    budget.choose([chain([1, 2, 3]), chain([])], budget.decide(views(2)))
    choice = budget.explain()
    assert choice is not None and (choice.reason, choice.nodes) == ("window", 3)
    assert choice.expected_tokens == pytest.approx(0.7 + 0.7**2 + 0.7**3)
    assert (choice.expected_ms, choice.plain_ms) == (pytest.approx(10.5), pytest.approx(10.2))
