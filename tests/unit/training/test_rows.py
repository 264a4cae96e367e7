"""Rows on their way from an engine to a trainer: parts joined by position, or given up."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import until
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.training import rows
from vllm_specrollout.training.rows import Rows, RowSink, RowSource, RowsPart

Ends = tuple[RowSink, RowSource]
Sent = tuple[RowsPart, np.ndarray, torch.Tensor]
names = itertools.count()


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    address = f"ipc://{tmp_path_factory.mktemp('rows')}/rows"
    source, sink = RowSource(address), RowSink(address)
    yield sink, source
    sink.close()
    source.close()


def parts_of(length: int, cuts: list[int], dtype: torch.dtype = torch.float32) -> list[Sent]:
    name = f"rows-{next(names)}"
    tokens = np.arange(100, 100 + length, dtype=np.int32)
    hidden = torch.randn(length, 4, 8).to(dtype)
    bounds = sorted({0, length, *(cut for cut in cuts if cut < length)})
    return [
        (RowsPart(name, b, e - b, length, min(2, length), 3), tokens[b:e], hidden[b:e])
        for b, e in itertools.pairwise(bounds)
    ]


def send(sink: RowSink, parts: list[Sent]) -> bool:
    """As one step's."""
    own, tokens, hidden = zip(*parts, strict=True)
    return sink.send(own, np.concatenate(tokens), torch.cat(hidden))


def hidden_of(parts: list[Sent]) -> torch.Tensor:
    return torch.cat([hidden for *_, hidden in parts])


def passed(ends: Ends, steps: list[list[Sent]]) -> list[Rows]:
    sink, source = ends
    found: list[Rows] = []
    for parts in steps:
        until(lambda parts=parts: send(sink, parts))  # the other end may not be there yet
        found += source.arrived(1.0)
    return found


@given(st.integers(1, 40), st.lists(st.integers(1, 39), max_size=5), st.sampled_from(list(rows._DTYPES.values())))
def test_an_answer_in_parts_arrives_as_it_was(ends: Ends, length: int, cuts: list[int], dtype: torch.dtype) -> None:
    parts = parts_of(length, cuts, dtype)
    (found,) = passed(ends, [[one] for one in parts])
    assert len(found) == length and found.prompt_tokens == min(2, length) and found.version == 3
    assert found.token_ids.dtype is torch.int32 and found.token_ids.tolist() == list(range(100, 100 + length))
    assert found.hidden.dtype is dtype and torch.equal(found.hidden, hidden_of(parts))


def test_answers_whose_parts_alternate_are_told_apart(ends: Ends) -> None:
    one, other = parts_of(9, [4]), parts_of(7, [5])
    found = passed(ends, [[one[0], other[0]], [other[1], one[1]]])
    assert [len(rows) for rows in found] == [7, 9]
    assert torch.equal(found[1].hidden, hidden_of(one))


@pytest.mark.parametrize("wrong", ["a gap", "other weights", "no beginning"])
def test_an_answer_that_misses_a_part_is_given_up(ends: Ends, wrong: str) -> None:
    parts = parts_of(12, [4, 8])
    if wrong == "a gap":
        del parts[1]
    elif wrong == "other weights":
        part, tokens, hidden = parts[1]
        parts[1] = (msgspec.structs.replace(part, version=4), tokens, hidden)
    else:
        del parts[0]
    assert passed(ends, [[one] for one in parts]) == []
    whole = parts_of(12, [4, 8])
    assert [len(rows) for rows in passed(ends, [[one] for one in whole])] == [12]


def test_one_that_begins_anew_is_taken_from_there(ends: Ends) -> None:
    parts = parts_of(12, [4, 8])
    (found,) = passed(ends, [[one] for one in (parts[0], parts[1], *parts)])
    assert torch.equal(found.hidden, hidden_of(parts))


def test_an_engine_never_waits_and_says_what_it_dropped(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/rows"
    sink = RowSink(address)
    try:
        assert not send(sink, parts_of(4, []))
        source = RowSource(address)
        until(lambda: send(sink, parts_of(4, [])))
        large = parts_of(1 << 16, [])
        sent = sum(send(sink, large) for _ in range(64))
        assert 0 < sent < 64 and sink.dropped >= 64 - sent
        found = list(source.arrived(1.0))
        assert len(found) <= sink.sent
        until(lambda: send(sink, parts_of(4, [])) or found.extend(source.arrived(0.1)))
        told = sink.sent + sink.dropped
        until(lambda: found.extend(source.arrived(0.1)) or max(source._next.values(), default=0) >= told)
        assert source.lost == sink.dropped and len(found) == sink.sent
        source.close()
    finally:
        sink.close()


def test_answers_of_which_parts_are_missing_are_bounded(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_OPEN", 2)
    first, *others = [parts_of(6, [3]) for _ in range(3)]
    passed(ends, [[first[0], *(one[0] for one in others)]])
    assert [len(rows) for rows in passed(ends, [[first[1], *(one[1] for one in others)]])] == [6, 6]


def test_rows_stay_on_their_host(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        RowSink("tcp://127.0.0.1:4000")
    assert "`tcp://127.0.0.1:4000` is no address for rows" in str(error.value) and "ipc:///PATH" in str(error.value)
    with pytest.raises(ConfigError, match="rows cannot come to"):
        RowSource(f"ipc://{tmp_path}/missing/rows")
    source = RowSource(f"ipc://{tmp_path}/rows")
    assert (tmp_path / "rows").stat().st_mode & 0o777 == 0o600
    source.close()
    assert not (tmp_path / "rows").exists()
