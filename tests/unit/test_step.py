"""The two halves of a step, with drafters of a few lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from vllm_specrollout.guard import Guard
from vllm_specrollout.policies.budget import FixedBudget
from vllm_specrollout.policies.das import DasBudget
from vllm_specrollout.policies.off import OffBudget
from vllm_specrollout.step import Speculation, unite_naively
from vllm_specrollout.types import (
    EMPTY_TREE,
    Decision,
    DraftTree,
    Ending,
    Feedback,
    RequestView,
    Status,
    chain,
)


class Says:
    """Always proposes one chain."""

    def __init__(self, name: str, tokens: list[int], probability: float = 0.5) -> None:
        self.name, self.tokens, self.probability = name, tokens, probability
        self.heard: list[Feedback] = []
        self.forgotten: list[str] = []
        self.finished: list[Ending] = []

    def propose(self, views: Sequence[RequestView], decisions: Sequence[Decision]) -> list[DraftTree]:
        return [chain(self.tokens, probability=self.probability) for _ in views]

    def observe(self, feedback: Sequence[Feedback]) -> None:
        self.heard += feedback

    def finish(self, ending: Ending) -> None:
        self.finished.append(ending)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


class _Dies(Says):
    def propose(self, views: Sequence[RequestView], decisions: Sequence[Decision]) -> list[DraftTree]:
        raise RuntimeError("out of ideas")


def _views(n: int) -> list[RequestView]:
    return [RequestView(str(i), np.zeros(3, np.int32), 1, 50) for i in range(n)]


def test_branches_of_several_drafters_become_one_tree() -> None:
    step = Speculation([Says("a", [1, 2]), Says("b", [1, 3])], FixedBudget(8, 8))
    tree = step.prepare(_views(1))[0]
    assert sorted(tree.token_ids.tolist()) == [1, 2, 3]


def test_only_requests_with_several_proposals_are_united_and_all_of_them_at_once() -> None:
    class Some(Says):
        def propose(self, views: Sequence[RequestView], decisions: Sequence[Decision]) -> list[DraftTree]:
            return [tree if i % 2 else EMPTY_TREE for i, tree in enumerate(super().propose(views, decisions))]

    calls = []

    def unite(groups: Sequence[Sequence[DraftTree]], max_nodes: Sequence[int]) -> list[DraftTree]:
        calls.append(([[tree.token_ids.tolist() for tree in group] for group in groups], list(max_nodes)))
        return unite_naively(groups, max_nodes)

    trees = Speculation([Says("a", [1, 2]), Some("b", [3])], FixedBudget(8, 8), unite).prepare(_views(4))
    assert calls == [([[[1, 2], [3]], [[1, 2], [3]]], [8, 8])]
    assert [sorted(tree.token_ids.tolist()) for tree in trees] == [[1, 2], [1, 2, 3]] * 2


def test_a_drafter_that_dies_costs_its_drafts_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    survivor = Says("a", [1, 2])
    step = Speculation([_Dies("b", []), survivor], FixedBudget(8, 8), guard=Guard(is_strict=False))
    assert [tree.size for tree in step.prepare(_views(2))] == [2, 2]
    assert step.drafters == [survivor]
    assert "drafter b failed" in caplog.text and step.guard.failures == {"drafter b": 1}


def test_without_any_drafter_left_requests_decode_plainly() -> None:
    step = Speculation([_Dies("b", [])], FixedBudget(8, 8), guard=Guard(is_strict=False))
    assert [tree.size for tree in step.prepare(_views(2))] == [0, 0]
    assert [tree.size for tree in step.prepare(_views(2))] == [0, 0]


def test_nobody_is_asked_when_nothing_may_be_drafted() -> None:
    step = Speculation([_Dies("b", [])], FixedBudget(0, 8))
    step.prepare(_views(1))
    assert step.drafters


def test_feedback_and_farewells_reach_every_drafter() -> None:
    drafters = [Says("a", [1]), Says("b", [2])]
    step = Speculation(drafters, FixedBudget(8, 8))
    none = np.empty(0, np.int32)
    step.settle([Feedback("7", 1, 0, none, none, none.astype(np.float32), none)], None)
    step.forget("7")
    assert all(len(d.heard) == 1 and d.forgotten == ["7"] for d in drafters)


def test_everybody_hears_how_a_request_ended() -> None:
    drafters = [Says("a", [1]), Says("b", [2])]
    budget = DasBudget(8, 8)
    ending = Ending("r", "p", np.zeros(2, np.int32), np.zeros(7, np.int32), Status.FINISHED)
    Speculation(drafters, budget).finish(ending)
    assert [drafter.finished for drafter in drafters] == [[ending], [ending]]
    assert budget.lengths.expected_total("p", 0, 100) == 7.0


def test_a_drafter_that_dies_of_an_ending_is_dropped() -> None:
    class Fragile(Says):
        def finish(self, ending: Ending) -> None:
            raise OSError("no space left on device")

    step = Speculation([Fragile("a", [1]), Says("b", [2])], FixedBudget(8, 8), guard=Guard(is_strict=False))
    step.finish(Ending("r", "p", np.zeros(2, np.int32), np.zeros(7, np.int32), Status.FINISHED))
    assert [drafter.name for drafter in step.drafters] == ["b"]


def test_a_budget_that_rests_is_not_asked_and_one_that_cannot_never_rests() -> None:
    assert Speculation([Says("a", [1])], OffBudget()).rests(4)
    assert not Speculation([Says("a", [1])], FixedBudget(8, 8)).rests(4)
