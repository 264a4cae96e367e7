"""Where each answer is: some 40 bytes of memory per answer, however long it is. Neither files nor locks.

Columns instead of objects: an object per answer would cost more than the compressed tokens of a short one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IN_MEMORY = 0
"""Number of the place that is no file."""
_NO_FILE = -1
_NO_EPOCH = (1 << 63) - 1


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
        # of answers ever added: a row is used again, its number is not
        self._serials = array("Q")
        self._next_serial = 0
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
        self._serials[row] = self._next_serial
        self._next_serial += 1
        self._epochs[row] = place.epoch
        self._num_tokens[row] = place.num_tokens
        self.move(row, place.file, place.offset, place.sequence)
        self.set_reward(row, place.reward)
        self._rows.setdefault(problem, array("i")).append(row)
        return row

    def _whole_numbers(self) -> tuple[array[int], ...]:
        columns = (self._problems, self._files, self._offsets, self._sequences, self._epochs, self._num_tokens)
        return (*columns, self._serials)

    def ticket(self, row: int) -> int:
        """Names the answer of a row, and never another one."""
        return self._serials[row] << 32 | row

    def row(self, ticket: int) -> int | None:
        """The row of that answer; None: it was dropped."""
        row = ticket & 0xFFFF_FFFF
        return row if self._serials[row] == ticket >> 32 and self._files[row] != _NO_FILE else None

    def oldest(self, count: int) -> list[int]:
        """Rows of so many answers: those of the earliest epochs, and of these what was added first."""
        files = np.array(self._files)
        rows = np.flatnonzero(files != _NO_FILE)
        order = np.lexsort((np.array(self._serials)[rows], np.array(self._epochs)[rows]))
        return [int(row) for row in rows[order[:count]]]

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

    def find(self, problem: int | None) -> list[Place]:
        """The problem's answers (None: all problems'), older epochs first, within an epoch in the order they came."""
        groups = self._rows.values() if problem is None else (self._rows.get(problem, ()),)
        return sorted((self.place(row) for rows in groups for row in rows), key=lambda place: place.epoch)

    def rows_before(self, epoch: int) -> list[int]:
        """Rows of answers of earlier epochs."""
        return np.flatnonzero(np.array(self._epochs) < epoch).tolist()

    def rows_of(self, file: int) -> list[int]:
        return np.flatnonzero(np.array(self._files) == file).tolist()

    def in_file(self, file: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Each [answers of the file]: rows, their offsets and their epochs, in the order of the file."""
        rows = np.flatnonzero(np.array(self._files) == file)
        rows = rows[np.argsort(np.array(self._offsets)[rows])]
        return rows, np.array(self._offsets)[rows], np.array(self._epochs)[rows]

    def num_tokens(self, file: int | None = None) -> int:
        """Of the file's answers, or of all."""
        tokens = np.array(self._num_tokens, dtype=np.int64)
        return int(tokens.sum() if file is None else tokens[np.array(self._files) == file].sum())

    def drop(self, dead: Iterable[int]) -> list[Place]:
        """Drop rows; returns what they held."""
        places = []
        for row in dead:
            places.append(self.place(row))
            problem = self._problems[row]
            rows = self._rows[problem]
            rows.remove(row)
            if not rows:
                del self._rows[problem]
            # so that no search over the columns finds it
            self._files[row], self._epochs[row], self._num_tokens[row] = _NO_FILE, _NO_EPOCH, 0
            self._free.append(row)
        return places
