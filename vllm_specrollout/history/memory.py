"""Compressed answers in memory, for a store without directory, or until they are written. No locks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.records import decode_record, encode_record


class Held(NamedTuple):
    # of the table
    row: int
    request_id: str
    record: bytes


class Memory:
    """Answers by key, oldest first, at most so many, and so many bytes of them."""

    def __init__(self, most_bytes: int, most_answers: int) -> None:
        self._most_bytes = most_bytes
        self._most_answers = most_answers
        self._held: OrderedDict[int, Held] = OrderedDict()
        self._next_key = 0
        self.num_bytes = 0
        """Of records; what Python adds to each is bounded by how many there are."""

    def __len__(self) -> int:
        return len(self._held)

    def put(self, answer: Answer) -> int:
        """Keep an answer; returns its key. `set_row` follows.

        Raises:
            ValueError: it is longer than an answer may be.
        """
        record = encode_record(answer)
        key = self._next_key
        self._held[key] = Held(-1, answer.request_id, record)
        self._next_key += 1
        self.num_bytes += len(record)
        return key

    def set_row(self, key: int, row: int) -> None:
        self._held[key] = self._held[key]._replace(row=row)

    def record(self, key: int) -> bytes:
        return self._held[key].record

    def drop(self, key: int) -> None:
        self.num_bytes -= len(self._held.pop(key).record)

    def get(self, key: int) -> Held | None:
        return self._held.get(key)

    def keys(self) -> list[int]:
        """Of all of them, oldest first."""
        return list(self._held)

    def overflow(self, least: int) -> Iterator[Held]:
        """Drop the oldest answers that there is no room for, but for so many."""
        while len(self._held) > least and (self.num_bytes > self._most_bytes or len(self._held) > self._most_answers):
            _, held = self._held.popitem(last=False)
            self.num_bytes -= len(held.record)
            yield held


def decode_answer(record: bytes) -> Answer:
    """The answer of a record that this process encoded."""
    answer = decode_record(record)
    assert isinstance(answer, Answer), "only answers are held"
    return answer
