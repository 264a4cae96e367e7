"""How drafts fared, and what of a tree still fits."""

import numpy as np
import pytest

from tests.unit.cluster.builders import floats, ints
from vllm_specrollout.cluster.messages import Drafts
from vllm_specrollout.cluster.received import Received, Score

# 5 6 7 is the stream; 8 and 9 are exits beside 6, 4 follows 8
TREE = Drafts(1, 0, 3, ints(5, 6, 8, 7, 4, 9), ints(-1, 0, 0, 1, 2, 0), floats(-0.1, -0.2, -1, -0.3, -0.5, -2))


@pytest.mark.parametrize(
    ("came", "score"),
    [
        ([], Score()),
        ([5], Score(1, 1, 1, 0)),
        ([5, 6, 7, 1], Score(3, 3, 3, 0)),
        ([3], Score(1, 0, 0, 2)),
        ([5, 8], Score(2, 1, 2, 1)),
        ([5, 8, 4], Score(3, 2, 3, 1)),
        ([5, 8, 6], Score(3, 1, 2, 1)),
        ([5, 2, 2], Score(2, 1, 1, 1)),
    ],
)
def test_each_position_that_the_target_came_to_counts_once(came: list[int], score: Score) -> None:
    for steps in (range(len(came) + 1), (len(came), len(came))):
        received = Received()
        received.put(TREE)
        for length in steps:
            received.fitting(ints(1, 2, 3, *came[:length]), 64, 64, False)
        assert received.score == score


def test_a_late_tree_is_scored_where_no_earlier_one_was() -> None:
    received = Received()
    received.put(Drafts(1, 0, 3, ints(5, 6), ints(-1, 0), floats(-0.1, -0.1)))
    received.fitting(ints(1, 2, 3, 5, 9), 64, 64, False)
    assert received.score == Score(2, 1, 1, 0)
    received.put(Drafts(1, 1, 4, ints(9, 7), ints(-1, 0), floats(-0.1, -0.1)))
    received.fitting(ints(1, 2, 3, 5, 9, 7), 64, 64, False)
    assert received.score == Score(3, 2, 2, 0)


def test_what_fits_is_what_stands_below_the_tokens_that_came() -> None:
    received = Received()
    received.put(TREE)
    fitting = received.fitting(ints(1, 2, 3, 5), 64, 64, False)
    assert fitting is not None
    assert fitting.token_ids == [6, 8, 7, 4, 9] and fitting.parents == [-1, -1, 0, 1, -1]
    assert fitting.is_first == [True, False, True, True, False]
    chain = received.fitting(ints(1, 2, 3, 5), 64, 64, True)
    assert chain is not None and chain.token_ids == [6, 7]
    assert received.fitting(ints(1, 2, 3, 5), 0, 64, False) is None
    assert received.fitting(np.append(TREE.token_ids[:0], [1, 2]).astype(np.int32), 64, 64, False) is None
