"""Drafted tokens that were got to and met, of the requests that a worker has, and of no others."""

from __future__ import annotations

from tests.trees import batch_of, chain
from tests.unit.observe.engine import record_of
from vllm_specrollout.cluster.group.member import Tries
from vllm_specrollout.types import EMPTY_TREE


def tries(*requests: str) -> Tries:
    own = Tries(lambda name: name.partition("-")[0])
    for request in requests:
        own.begin(request)
    return own


def test_a_miss_counts_as_tried_and_what_lies_behind_it_does_not() -> None:
    own = tries("a", "b", "c")
    trees = batch_of([chain([7] * 4), chain([7] * 2), EMPTY_TREE], ["a-1", "b-2", "c-3"])
    own.stepped(record_of(trees, [[0], [0, 1], []]))
    assert own.counts == {"a": (2, 1), "b": (2, 2), "c": (0, 0)}


def test_a_step_that_is_told_of_once_its_request_is_over_leaves_nothing() -> None:
    own = tries("a", "b")
    trees = batch_of([chain([7] * 4), chain([7] * 2)], ["a-1", "b-2"])
    own.forget("a")
    own.stepped(record_of(trees, [[0], [0]]))
    assert own.counts == {"b": (2, 1)}
