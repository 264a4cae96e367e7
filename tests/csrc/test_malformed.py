"""Arrays that say something impossible are refused: what they would lead to lies outside of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vllm_specrollout import _core


def i(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def paths(row_start: np.ndarray, base: np.ndarray, block_size: int = 32) -> Any:
    return _core.expand_paths(row_start, base, i(0, 1), i(-1), np.zeros((1, 4), np.int32), block_size, i(), 0)


def blocks(address: int, target: int) -> Any:
    return _core.copy_blocks(np.asarray([address], np.uint64), *(np.asarray([number]) for number in (64, 0, target)))


def history() -> Any:
    """It has one document, 0."""
    index = _core.HistoryIndex(min_match=1, max_match=7, max_matches=32)
    index.open(0)
    return index


REFUSED: dict[str, Callable[[], object]] = {
    "scratch, a parent far outside": lambda: _core.without_scratch(i(0, 1), i(1 << 30), i(5), 32, 4),
    "scratch, a parent after its child": lambda: _core.without_scratch(i(0, 2), i(1, 0), i(5), 32, 4),
    "scratch, a node its own parent": lambda: _core.without_scratch(i(0, 3), i(-1, 1, 1), i(5), 32, 4),
    "scratch, blocks of nothing": lambda: _core.without_scratch(i(0, 2), i(-1, -1), i(5), 0, 4),
    "scratch, a root beyond all positions": lambda: _core.without_scratch(i(0, 1), i(-1), i(2**31 - 1), 32, 4),
    "paths, rows that are not there": lambda: paths(i(0, 1), i(5)),
    "paths, rows below 0": lambda: paths(i(0, -5), i(5)),
    "paths, rows that begin elsewhere": lambda: paths(i(7, 9), i(5)),
    "paths, a position beyond the table": lambda: paths(i(0, 2), i(100_000_000)),
    "paths, the first position beyond the table": lambda: paths(i(0, 2), i(127)),
    "paths, a position below 0": lambda: paths(i(0, 2), i(-100_000_000)),
    "paths, blocks of nothing": lambda: paths(i(0, 2), i(5), 0),
    "walk, over nothing": lambda: _core.walk(i(), i(), i(), np.zeros(0, np.int64)),
    "blocks, no address": lambda: blocks(0, 1),
    "blocks, one below 0": lambda: blocks(4096, -1),
    "history, end tokens of nobody": lambda: _core.propose_history(
        [history()], [0], [4], [4], [False], True, i(0, 0), i(7)
    ),
    "open nodes, end tokens of too few": lambda: _core.open_nodes(i(0, 1, 2), i(-1, -1), i(5, 5), i(0, 1), i(5)),
    "open nodes, a start that falls": lambda: _core.open_nodes(i(0, 1), i(-1), i(5), i(0, 3, 1), i(5)),
    "history, a document that is none": lambda: _core.propose_history([history()], [-1], [4], [4], [False]),
    "history, a token beyond 32 bits": lambda: history().set_prompt(np.asarray([2**40, 1, 2])),
    "history, tokens that are no whole numbers": lambda: history().set_prompt(np.asarray([1.5, np.nan, 2])),
    "history, tokens that are truths": lambda: history().set_prompt(np.asarray([True, False])),
    "history, a token below 32 bits": lambda: history().set_prompt(np.asarray([1, -(2**40)])),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_impossible_is_refused(case: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        REFUSED[case]()


SAID: dict[str, Callable[[], object]] = {
    "deeper than its list": lambda: _core.by_depth([np.zeros(2, np.int64)], i(0, 2), i(0, 1, 2)),
    "scratch": lambda: _core.expand_paths(i(0, 3), i(5), i(0, 2), i(-1, -1), i(1, 2)[None], 4, i(), 0),
    "parents": lambda: _core.walk(i(0, 2), i(1, -1), i(7, 8), np.zeros(3, np.int64)),
    "accepted nodes that it does not have": lambda: _core.tally(
        i(0, 1), i(-1), np.zeros(1, np.float32), i(0), i(1), i(3)
    ),
    "one of each bound": lambda: _core.propose_history([history()], [0], [1, 2], [1], [True]),
    "None": lambda: _core.propose_history([None], [0], [1], [1], [True]),
    "dimension": lambda: history().append(0, np.zeros((2, 2), np.int32)),
    "weight": lambda: history().set_weight(0, -1),
}


@pytest.mark.parametrize("words", SAID)
def test_what_does_not_belong_together_is_refused_and_said(words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SAID[words]()


def test_the_last_position_that_the_table_holds_is_fine() -> None:
    assert paths(i(0, 2), i(126))["seq_lens"].tolist() == [128]


def test_tokens_of_another_width_that_fit_are_taken_as_they_are() -> None:
    index, document = history(), 0
    index.sync(document, np.asarray([1, 2, 3], np.int64))
    index.append(document, np.asarray([1, 2], np.uint16))
    index.append(document, np.asarray([], np.float64))
    index.append(document, np.asarray([9, 1, 9, 2], np.int32)[1::2])  # not contiguous
    drafted = _core.propose_history([index], [document], [4], [4], [True])[1]
    assert index.num_tokens == 7 and drafted.tolist()[:2] == [1, 2]
    index.check_integrity()


def test_what_is_no_number_counts_as_impossible_and_leads_nowhere() -> None:
    """`check_batch` refuses such words; whoever leaves it out gets no table's cell from outside of it."""
    columns = (i(0, 2), i(1, 2), i(-1, -1), np.asarray([np.nan, np.inf], np.float32), i(0, 0))
    merged = _core.merge_select([columns], i(4), i(4), np.zeros(1, np.bool_), np.ones((16, 10)), 0, None, 0)
    assert np.isfinite(merged[6]).all()
    counts, _, _ = _core.tally(columns[0], columns[2], columns[3], columns[4], i(0), i())
    assert counts[0].sum() == 2
    with pytest.raises(ValueError, match="is not the log of a probability"):
        _core.check_batch(*columns, 1, 100)
