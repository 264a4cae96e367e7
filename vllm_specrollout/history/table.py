"""Where each answer is: some 40 bytes of memory per answer, however long it is. Neither files nor locks.

Columns instead of objects: an object per answer would cost more than the compressed tokens of a short one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import NamedTuple

IN_MEMORY = 0
"""Number of the place that is no file."""


class Place(NamedTuple):
    """Where one answer is, and what must be known of it without reading it."""

    # which of the store's files, or IN_MEMORY
    file: int
    # of the record, in bytes; in memory: its key
    offset: int
    # of the record in its file; in memory: 0
    sequence: int
    epoch: int
    reward: float | None
    num_tokens: int


def key_of(problem_id: str) -> int:
    """64 bits of a problem's id. Two problems with the same bits are told apart when their answers are read."""
    data = problem_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


class Table:
    """Places of answers by problem. Rows are numbers that stay valid until they are dropped, then used again."""

    def __init__(self) -> None:
        # all [rows]
        self._problems = array("Q")
        self._files = array("i")
        self._offsets = array("q")
        self._sequences = array("I")
        self._epochs = array("q")
        self._rewards = array("d")
        self._num_tokens = array("i")
        # [rows of the problem] in the order they came
        self._rows: dict[int, array[int]] = {}
        self._free = array("i")

    def __len__(self) -> int:
        return len(self._files) - len(self._free)

    @property
    def num_problems(self) -> int:
        return len(self._rows)

    def add(self, problem: int, place: Place) -> int:
        """Add an answer; returns its row."""
        if self._free:
            row = self._free.pop()
        else:
            row = len(self._files)
            for column in self._whole_numbers():
                column.append(0)
            self._rewards.append(0.0)
        self._problems[row] = problem
        self._epochs[row] = place.epoch
        self._num_tokens[row] = place.num_tokens
        self.move(row, place.file, place.offset, place.sequence)
        self.set_reward(row, place.reward)
        self._rows.setdefault(problem, array("i")).append(row)
        return row

    def _whole_numbers(self) -> tuple[array[int], ...]:
        return (self._problems, self._files, self._offsets, self._sequences, self._epochs, self._num_tokens)

    def move(self, row: int, file: int, offset: int, sequence: int) -> None:
        self._files[row] = file
        self._offsets[row] = offset
        self._sequences[row] = sequence

    def set_reward(self, row: int, reward: float | None) -> None:
        self._rewards[row] = math.nan if reward is None else reward

    def place(self, row: int) -> Place:
        reward = self._rewards[row]
        return Place(
            self._files[row],
            self._offsets[row],
            self._sequences[row],
            self._epochs[row],
            None if math.isnan(reward) else reward,
            self._num_tokens[row],
        )

    def find(self, problem: int) -> list[Place]:
        """The problem's answers, older epochs first, within an epoch in the order they came."""
        places = [self.place(row) for row in self._rows.get(problem, ())]
        return sorted(places, key=lambda place: place.epoch)

    def all(self) -> list[Place]:
        """All answers, older epochs first."""
        places = [self.place(row) for rows in self._rows.values() for row in rows]
        return sorted(places, key=lambda place: place.epoch)

    def rows(self) -> Iterator[tuple[int, Place]]:
        for rows in self._rows.values():
            for row in rows:
                yield row, self.place(row)

    def drop(self, is_dead: Callable[[Place], bool]) -> list[tuple[int, Place]]:
        """Drop the rows for which the function says so; returns them."""
        dropped = []
        for problem in list(self._rows):
            rows = self._rows[problem]
            dead = {row: self.place(row) for row in rows if is_dead(self.place(row))}
            if not dead:
                continue
            dropped += list(dead.items())
            self._free.extend(dead)
            kept = array("i", (row for row in rows if row not in dead))
            if kept:
                self._rows[problem] = kept
            else:
                del self._rows[problem]
        return dropped

    def drop_row(self, row: int) -> None:
        """Drop one row."""
        problem = self._problems[row]
        rows = self._rows[problem]
        rows.remove(row)
        self._free.append(row)
        if not rows:
            del self._rows[problem]
