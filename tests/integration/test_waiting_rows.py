"""Rows of the target that wait for a drafting model."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import tree_parents
from tests.trees import batch_of, tree_of
from vllm_specrollout.trees.batch import chains
from vllm_specrollout.types import VerifyResult
from vllm_specrollout.worker.models import proposing
from vllm_specrollout.worker.models.proposing import HeldRows, WaitingRows, first_rows, have_prompts, rows_that_hold


def rows(*requests: tuple[str, list[int]]) -> HeldRows:
    """Each token is its own position, and its hidden state ten times that."""
    tokens = torch.tensor([token for _, own in requests for token in own], dtype=torch.int32)
    counts = np.asarray([len(own) for _, own in requests], dtype=np.int64)
    return HeldRows([name for name, _ in requests], counts, tokens, tokens.long(), tokens[:, None] * 10.0)


def taken(waiting: WaitingRows, *names: str) -> dict[str, list[int]]:
    found = waiting.take(names)
    ends = np.cumsum(found.counts).tolist()
    assert found.positions.tolist() == found.token_ids.tolist()
    assert found.hidden[:, 0].tolist() == [10.0 * token for token in found.token_ids.tolist()]
    tokens = found.token_ids.tolist()
    return {name: tokens[end - int(n) : end] for name, n, end in zip(names, found.counts, ends, strict=True)}


def test_of_each_request_the_first_rows_are_kept_and_of_some_none() -> None:
    counts, index = np.asarray([2, 1, 3]), np.asarray([0, 1, 4, 5, 7, 8])
    names, kept, left = first_rows(["a", "", "c"], counts, np.asarray([2, 0, 1]), index)
    assert names == ["a", "c"] and kept.tolist() == [2, 1] and left.tolist() == [0, 1, 5]
    names, kept, left = first_rows(["a", "", "c"], counts, np.zeros(3, np.int64), index)
    assert names == [] and not len(kept) and not len(left)


@given(st.sampled_from([1, 3, proposing.MOST_PARTS]), st.data())
def test_whatever_comes_and_goes_each_request_gets_its_own_rows_once_in_order_and_memory_is_counted(
    most: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposing, "MOST_PARTS", most)
        _comes_and_goes(data)


def _comes_and_goes(data: st.DataObject) -> None:
    waiting, expected, token = WaitingRows(), dict[str, list[int]](), 0
    names = st.sampled_from("abcd")
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["add", "take", "forget", "drop"]))
        if action == "add":
            part = []
            for name in data.draw(st.lists(names, min_size=1, max_size=4, unique=True)):
                count = data.draw(st.integers(1, 3))
                part.append((name, list(range(token, token + count))))
                expected[name] = expected.get(name, []) + part[-1][1]
                token += count
            waiting.add(rows(*part))
        elif action == "take" and expected:
            chosen = data.draw(st.lists(st.sampled_from(sorted(expected)), min_size=1, unique=True))
            assert taken(waiting, *chosen) == {name: expected.pop(name) for name in chosen}
        elif action == "forget":
            name = data.draw(names)
            waiting.forget(name)
            expected.pop(name, None)
        else:
            waiting.drop_gone()
            assert len(waiting) == sum(map(len, expected.values()))
        assert waiting.request_ids() == list(expected)
        # a hidden state is one float32 here
        assert waiting.num_bytes == 4 * len(waiting)


def test_steps_that_nobody_asks_about_do_not_pile_up() -> None:
    """A draft model has no hidden states whose bytes would have it fed."""
    waiting = WaitingRows()
    for step in range(5 * proposing.MOST_PARTS):
        waiting.add(HeldRows([f"r{step}"], np.ones(1, np.int64), torch.ones(1), torch.ones(1), torch.empty(1, 0)))
        waiting.forget(f"r{step}")
    assert len(waiting) <= proposing.MOST_PARTS + 1
    for _ in range(5 * proposing.MOST_PARTS):
        waiting.add(HeldRows(["a"], np.ones(1, np.int64), torch.ones(1), torch.ones(1), torch.empty(1, 0)))
    # one entry for each part, not for each step
    assert sum(len(part.request_ids) for part in waiting._parts) <= proposing.MOST_PARTS + 1


def test_requests_with_more_than_one_row_that_was_not_drafted_have_prompts() -> None:
    trees = chains(["a", "b", "c"], [[1, 2], [], [3]])
    starts = np.asarray([0, 3, 5, 12], np.int32)
    assert have_prompts(starts, trees).tolist() == [False, True, True]
    assert have_prompts(starts, None).tolist() == [True, True, True]


@given(st.lists(st.tuples(st.integers(1, 4), tree_parents(6)), min_size=1, max_size=4), st.data())
def test_known_rows_and_accepted_ones_hold(requests: list[tuple[int, list[int]]], data: st.DataObject) -> None:
    trees = batch_of([tree_of(own, [0] * len(own), [1.0] * len(own)) for _, own in requests])
    accepted: list[list[int]] = []
    for _, own in requests:
        path, node = [], -1
        while below := [i for i, parent in enumerate(own) if parent == node]:
            if not data.draw(st.booleans()):
                break
            node = data.draw(st.sampled_from(below))
            path.append(node)
        accepted.append(path)
    starts = np.cumsum([0, *(known + len(own) for known, own in requests)]).astype(np.int32)
    result = VerifyResult(
        np.asarray([len(path) for path in accepted], np.int32), np.asarray(sum(accepted, []), np.int32)
    )
    index, counts = rows_that_hold(starts, trees, result)
    wanted = [
        [*range(start, start + known), *(start + known + node for node in path)]
        for start, (known, _), path in zip(starts.tolist(), requests, accepted, strict=False)
    ]
    assert index.tolist() == sum(wanted, [])
    assert counts.tolist() == [len(own) for own in wanted]
    index, counts = rows_that_hold(starts, None, None)
    assert index.tolist() == list(range(int(starts[-1]))) and counts.tolist() == np.diff(starts).tolist()
