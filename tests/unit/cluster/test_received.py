"""What came from a drafter: which of its choices a request's tokens were."""

from __future__ import annotations

import numpy as np

from vllm_specrollout.cluster.messages import Drafts
from vllm_specrollout.cluster.received import NONE_OF_THEM, Received


def drafts(position: int, tokens: list[int], parents: list[int]) -> Drafts:
    return Drafts(
        1, 0, position, np.asarray(tokens, np.int32), np.asarray(parents, np.int32), np.zeros(len(tokens), np.float32)
    )


def fitting(received: Received, tokens: list[int]) -> list[int] | None:
    found = received.fitting(np.asarray(tokens, np.int32), 8, 8, False)
    return None if found is None else found.token_ids


# below position 2: 5 or 6; behind 5: 7 or 8
TREE = drafts(2, [5, 6, 7, 8], [-1, -1, 0, 0])


def test_each_token_is_ranked_once_however_often_a_tree_is_asked() -> None:
    received = Received()
    received.put(TREE)
    assert fitting(received, [1, 2]) == [5, 6, 7, 8] and received.ranks == []
    assert fitting(received, [1, 2, 5]) == [7, 8] and fitting(received, [1, 2, 5]) == [7, 8]
    assert received.ranks == [0]
    received.put(drafts(2, [5, 6, 7, 8], [-1, -1, 0, 0]))
    assert fitting(received, [1, 2, 5, 8]) is None
    assert received.ranks == [0, 1]


def test_a_token_that_no_choice_was_is_none_of_them() -> None:
    received = Received()
    received.put(TREE)
    assert fitting(received, [1, 2, 9]) is None and received.ranks == [NONE_OF_THEM]
    assert fitting(received, [1, 2, 9]) is None and received.ranks == [NONE_OF_THEM]


def test_a_token_behind_a_leaf_has_no_rank() -> None:
    received = Received()
    received.put(TREE)
    assert fitting(received, [1, 2, 6, 4]) is None
    assert received.ranks == [1]
