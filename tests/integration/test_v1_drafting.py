"""From drafted trees to the scheduled step's arrays, and from verdicts to what policies and drafters hear."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_specrollout.guard import Guard
from vllm_specrollout.types import EMPTY_TREE, DraftTree, Feedback, RequestView, StepTiming, chain
from vllm_specrollout.worker.v1.drafting import Drafting

FORKED = DraftTree(
    np.asarray([5, 6, 7], np.int32),
    np.asarray([-1, 0, 0], np.int32),
    np.asarray([-0.5, -0.25, -2.0], np.float32),
    np.asarray([1, 1, 0], np.int32),
)


class _Speculation:
    """Hands out ready trees, and keeps what it is told."""

    def __init__(self, trees: list[DraftTree]) -> None:
        self.trees = trees
        self.heard: list[Feedback] = []
        self.guard = Guard(is_strict=True)

    def prepare(self, views: Sequence[RequestView]) -> list[DraftTree]:
        return list(self.trees)

    def settle(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        self.heard = list(feedback)


def _views(count: int) -> list[RequestView]:
    return [RequestView(str(i), np.zeros(20, np.int32), 4, 50) for i in range(count)]


def _drafted(trees: list[DraftTree], num_scratch: int = 100, max_nodes: int | None = None) -> Drafting:
    drafting = Drafting(_Speculation(trees), num_scratch, 16, max_nodes)  # type: ignore[arg-type]
    drafting.prepare(lambda: _views(len(trees)), 1)
    return drafting


def test_the_scheduled_step_is_the_drafted_trees_behind_one_another() -> None:
    drafts = _drafted([FORKED, EMPTY_TREE, chain([8, 9])]).scheduled(["0", "1", "2"], {"0": [5, 6, 7], "2": [8, 9]})
    assert drafts.node_start.tolist() == [0, 3, 3, 5]
    assert drafts.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert drafts.parents.tolist() == [-1, 0, 0, -1, 0]
    assert drafts.has_branches
    assert all(array.dtype == np.int32 for array in (drafts.node_start, drafts.token_ids, drafts.parents))


def test_a_tree_that_the_scheduler_cut_is_its_first_nodes() -> None:
    drafting = _drafted([FORKED])
    drafts = drafting.scheduled(["0"], {"0": [5, 6]})
    assert drafts.parents.tolist() == [-1, 0]
    drafting.settle(["0"], drafts, np.asarray([1], np.int32), np.asarray([0], np.int32), None)
    (heard,) = drafting.speculation.heard
    assert (heard.drafted, heard.accepted) == (2, 1)
    assert (heard.log_q.tolist(), heard.source.tolist()) == ([-0.5, -0.25], [1, 1])


def test_tokens_without_a_tree_are_a_chain() -> None:
    drafts = _drafted([FORKED]).scheduled(["0", "new"], {"0": [5, 1], "new": [3]})
    assert drafts.parents.tolist() == [-1, 0, -1]
    assert drafts.token_ids.tolist() == [5, 1, 3]
    assert not drafts.has_branches


def test_each_request_hears_of_its_own_accepted_nodes_and_others_of_nothing() -> None:
    drafting = _drafted([FORKED, EMPTY_TREE, chain([8, 9])])
    drafts = drafting.scheduled(["0", "1", "2"], {"0": [5, 6, 7], "2": [8, 9]})
    drafting.settle(["0", "1", "2"], drafts, np.asarray([2, 0, 1], np.int32), np.asarray([0, 2, 0], np.int32), None)
    heard = drafting.speculation.heard
    assert [(h.request_id, h.accepted_nodes.tolist(), h.batch) for h in heard] == [("0", [0, 2], 3), ("2", [0], 3)]


def test_a_tree_without_scratch_blocks_left_drafts_its_best_path() -> None:
    drafting = _drafted([FORKED, FORKED], num_scratch=1)
    drafts = drafting.scheduled(["0", "1"], {"0": [5, 6, 7], "1": [5, 6]})
    assert [tree.size for tree in drafts.trees] == [3, 2]
    assert drafts.parents.tolist() == [-1, 0, 0, -1, 0]
    assert drafts.trees[1].log_q.tolist() == [-0.5, -0.25]


def test_too_many_nodes_are_cut_to_equal_shares() -> None:
    drafting = _drafted([chain([1, 2, 3]), chain([4, 5, 6]), EMPTY_TREE], max_nodes=4)
    tokens, _ = drafting.prepare(lambda: _views(3), 1)
    assert tokens.req_ids == ["0", "1"]
    assert tokens.draft_token_ids == [[1, 2], [4, 5]]


def test_a_mistake_while_drafting_costs_the_drafts_of_the_step() -> None:
    drafting = _drafted([FORKED])
    drafting.speculation.guard = Guard(is_strict=False)

    def blind() -> list[RequestView]:
        raise RuntimeError("no request can be seen")

    tokens, spent_ms = drafting.prepare(blind, 1)
    assert (tokens.req_ids, tokens.draft_token_ids, spent_ms) == ([], [], 0.0)
    assert drafting.speculation.guard.failures == {"drafting": 1}


def test_a_step_that_cannot_be_learned_from_goes_on() -> None:
    drafting = _drafted([FORKED])
    drafting.speculation.guard = Guard(is_strict=False)
    drafts = drafting.scheduled(["0"], {"0": [5, 6]})
    drafting.settle(["0", "of nobody"], drafts, np.asarray([1], np.int32), np.asarray([0], np.int32), None)
    assert drafting.speculation.guard.failures == {"learning": 1}
