import numpy as np
import pytest

from tests.unit.budgets.papers.builders import Line, chains_of, requests, step
from vllm_specrollout.budgets.papers.histospec import HistoSpecBudget
from vllm_specrollout.types import Answer, FinishReason

_NONE = np.zeros(0, np.int32)


def _histospec(max_nodes: int = 64, *, row: float = 0.2) -> HistoSpecBudget:
    return HistoSpecBudget(max_nodes, 64, cost=Line(10.0, row))


def _windows(budget: HistoSpecBudget, count: int = 1) -> list[int]:
    return budget.limits(requests(count)).max_nodes.tolist()


def test_a_window_opens_at_2_grows_by_2_and_stops_at_the_cap() -> None:
    budget, seen = _histospec(), []
    for _ in range(20):
        seen += _windows(budget)
        budget.observe(step(seen[-1:], seen[-1:]))
    assert seen == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 32, 32, 32, 32]


@pytest.mark.parametrize(
    ("steps", "window"),
    [([(2, 2)] * 5, 12), ([(2, 2)] * 5 + [(12, 11)], 2), ([(2, 2), (0, 0)], 4), ([(1, 1)], 4)],
    ids=["accepted whole", "one token rejected", "no draft", "a shorter draft than the window"],
)
def test_a_window_grows_with_each_draft_accepted_whole_and_begins_anew_after_a_rejection(
    steps: list[tuple[int, int]], window: int
) -> None:
    budget = _histospec()
    for size, accepted in steps:
        budget.observe(step([size], [accepted]))
    assert _windows(budget) == [window]


def test_each_answer_has_a_window_of_its_own_which_ends_with_it() -> None:
    budget = _histospec()
    budget.observe(step([2, 2], [2, 0]))
    assert _windows(budget, 3) == [4, 2, 2]
    budget.finish(Answer("r0", "", _NONE, _NONE, FinishReason.FINISHED))
    assert _windows(budget, 2) == [2, 2] and set(budget.windows) == {"r1"}


def test_the_engines_limits_cap_the_window() -> None:
    budget = _histospec(5)
    for _ in range(5):
        budget.observe(step([2], [2]))
    assert _windows(budget) == [5]


def test_windows_are_chains_and_are_verified_whole() -> None:
    budget, batch = _histospec(), requests(2)
    limits = budget.limits(batch)
    plan = budget.choose(chains_of(batch, 8), limits, batch, 0.0)
    assert limits.is_chain.all() and plan.trees.sizes.tolist() == [2, 2]
    assert (plan.is_on, plan.reason) == (True, "window")


@pytest.mark.parametrize("num_requests", [1, 4, 16, 64, 256])
def test_it_drafts_up_to_the_largest_batch_that_gains(num_requests: int) -> None:
    budget = _histospec(row=0.2)
    for _ in range(400):
        budget.observe(step([4], [2]))
    plain, drafted = 10.0 + 0.2 * num_requests, 10.0 + 0.2 * 5 * num_requests
    assert budget.pays(num_requests) == (3.0 * plain >= drafted)
    assert budget.steps_off(num_requests) == int(not budget.pays(num_requests))


def test_a_batch_too_large_for_the_acceptance_is_left_alone_but_probed() -> None:
    budget = _histospec(row=1.0)
    for _ in range(200):
        budget.observe(step([4] * 16, [0] * 16))
    asked = []
    for i in range(70):
        if budget.steps_off(16):
            budget.observe(step([0] * 16, [0] * 16))
        else:
            assert budget.limits(requests(16)).reason == "probe"
            asked.append(i)
    assert asked == [32, 65]


def test_a_batch_that_has_shrunk_is_drafted_for_at_once() -> None:
    budget = _histospec(row=1.0)
    for _ in range(200):
        budget.observe(step([4] * 16, [1] * 16))
    assert [budget.steps_off(n) for n in (64, 64, 1)] == [1, 1, 0]


def test_acceptance_brings_drafting_back() -> None:
    budget = _histospec(row=1.0)
    for _ in range(200):
        budget.observe(step([4], [0]))
    assert not budget.pays(8)
    for _ in range(200):
        budget.observe(step([4], [4]))
    assert budget.pays(8)
