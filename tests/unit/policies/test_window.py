"""RhymeRL's window: grows with success, starts over after a rejection, and leaves large batches alone."""

from __future__ import annotations

import numpy as np

from vllm_specrollout.policies.window import WindowBudget
from vllm_specrollout.types import Ending, Feedback, RequestView, Shape, Status, StepTiming, chain

_NONE = np.zeros(0, np.int32)


def _view(name: str = "r", **kwargs: object) -> RequestView:
    return RequestView(**{"request_id": name, "token_ids": np.zeros(4, np.int32), "num_prompt_tokens": 2,
                          "max_new_tokens": 100, **kwargs})  # fmt: skip


def _feedback(drafted: int, accepted: int, name: str = "r") -> Feedback:
    tree = chain(list(range(drafted)))
    return Feedback(name, drafted, accepted, tree.parents, tree.source, tree.log_q, np.arange(accepted, dtype=np.int32))


def _window(budget: WindowBudget, name: str = "r") -> int:
    return budget.decide([_view(name)])[0].max_nodes


def test_a_window_opens_at_2_grows_by_2_and_stops_at_the_cap() -> None:
    budget, seen = WindowBudget(64, 64), []
    for _ in range(20):
        seen.append(_window(budget))
        budget.observe([_feedback(seen[-1], seen[-1])], None)
    assert seen == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 32, 32, 32, 32]


def test_one_rejected_token_sets_the_window_back_to_2() -> None:
    budget = WindowBudget(64, 64)
    for _ in range(5):
        budget.observe([_feedback(2, 2)], None)
    assert _window(budget) == 12
    budget.observe([_feedback(12, 11)], None)
    assert _window(budget) == 2


def test_each_answer_has_a_window_of_its_own_which_ends_with_it() -> None:
    budget = WindowBudget(64, 64)
    budget.observe([_feedback(2, 2, "a"), _feedback(2, 0, "b")], None)
    assert (_window(budget, "a"), _window(budget, "b")) == (4, 2)
    budget.finish(Ending("a", "", _NONE, _NONE, Status.FINISHED))
    assert _window(budget, "a") == 2


def test_the_engines_limits_cap_the_window() -> None:
    budget = WindowBudget(64, 5)
    for _ in range(5):
        budget.observe([_feedback(2, 2)], None)
    assert _window(budget) == 5


def test_drafts_are_chains() -> None:
    assert WindowBudget(64, 64).decide([_view()])[0].shape is Shape.CHAIN


def test_a_shorter_draft_than_the_window_counts_as_accepted_whole() -> None:
    budget = WindowBudget(64, 64)
    budget.observe([_feedback(1, 1)], None)
    assert _window(budget) == 4


def test_a_batch_too_large_for_the_acceptance_is_left_alone_but_probed() -> None:
    budget, rng = WindowBudget(64, 64), np.random.default_rng(0)
    for _ in range(200):
        # rows as dear as steps, and nothing is ever accepted
        batch, nodes = int(rng.integers(1, 32)), int(rng.integers(0, 30))
        timing = StepTiming(batch, batch + nodes, nodes, 0, batch, 1.0 + (batch + nodes), True)
        budget.observe([_feedback(4, 0)], timing)
    decided = [budget.decide([_view(str(i)) for i in range(16)])[0].max_nodes for _ in range(64)]
    assert decided.count(0) == 62
    assert {n for n in decided if n} == {2}


def test_acceptance_brings_drafting_back() -> None:
    budget = WindowBudget(64, 64)
    for _ in range(200):
        budget.observe([_feedback(4, 0)], StepTiming(8, 12, 4, 0, 8, 10.0 + 1.0 * 12, True))
    assert not budget._pays(8)
    for _ in range(300):
        budget.observe([_feedback(4, 4)], StepTiming(8, 12, 4, 0, 8, 10.0 + 1.0 * 12, True))
    assert budget._pays(8)
