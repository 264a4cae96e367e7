"""Where each answer is: some 60 bytes of memory per answer, however long it is. Neither files nor locks.

Columns instead of objects: an object per answer would cost more than the compressed tokens of a short one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, NamedTuple

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


class Selection(NamedTuple):
    """Answers as they stood when they were asked for, in no order: what takes long is done with these."""

    # each [answers]
    rows: npt.NDArray[np.int64]
    # in the order in which they were added
    serials: npt.NDArray[np.uint64]
    epochs: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def tickets(self) -> list[int]:
        """Their names, which lead to nothing once they are dropped."""
        return (self.serials << np.uint64(32) | self.rows.astype(np.uint64)).tolist()

    def picked(self, which: npt.NDArray[Any]) -> Selection:
        """Those of these numbers, in this order; or those where it is true."""
        return Selection(*(column[which] for column in self))

    def oldest_first(self) -> Selection:
        """By epoch; within an epoch in the order in which they were added."""
        return self.picked(np.lexsort((self.serials, self.epochs)))


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
        # where it stands among its problem's rows
        self._positions = array("i")
        # [rows of the problem] in no order
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
        rows = self._rows.setdefault(problem, array("i"))
        self._positions[row] = len(rows)
        rows.append(row)
        return row

    def _whole_numbers(self) -> tuple[array[int], ...]:
        columns = (self._problems, self._files, self._offsets, self._sequences, self._epochs, self._num_tokens)
        return (*columns, self._serials, self._positions)

    def ticket(self, row: int) -> int:
        """Names the answer of a row, and never another one."""
        return self._serials[row] << 32 | row

    def row(self, ticket: int) -> int | None:
        """The row of that answer; None: it was dropped."""
        row = ticket & 0xFFFF_FFFF
        return row if self._serials[row] == ticket >> 32 and self._files[row] != _NO_FILE else None

    def move_all(self, rows: npt.NDArray[np.int64], file: int, offsets: array[int], first: int) -> int:
        """Say where in a file these answers are now, one behind the other from that sequence number on.

        Args:
            offsets: [rows] bytes.

        Returns:
            Their tokens.
        """
        np.asarray(self._files)[rows] = file
        np.asarray(self._offsets)[rows] = offsets
        np.asarray(self._sequences)[rows] = np.arange(first, first + len(rows))
        return int(np.asarray(self._num_tokens)[rows].sum(dtype=np.int64))

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

    def of_problem(self, problem: int | None) -> Selection:
        """The problem's answers; None: all problems'."""
        if problem is None:
            return self._selection(np.flatnonzero(np.asarray(self._files) != _NO_FILE))
        return self._selection(np.array(self._rows.get(problem, array("i")), dtype=np.int64))

    def of_file(self, file: int) -> Selection:
        return self._selection(np.flatnonzero(np.asarray(self._files) == file))

    def before(self, epoch: int) -> Selection:
        """Answers of earlier epochs."""
        return self._selection(np.flatnonzero(np.asarray(self._epochs) < epoch))

    def _selection(self, rows: npt.NDArray[np.int64]) -> Selection:
        # looked at in place, and copied where they are picked from: no column may grow while somebody looks at it
        columns = (self._serials, self._epochs, self._offsets)
        return Selection(rows, *(np.asarray(column)[rows] for column in columns))

    def num_tokens(self, file: int | None = None) -> int:
        """Of the file's answers, or of all."""
        tokens = np.asarray(self._num_tokens)
        return int(tokens.sum(dtype=np.int64) if file is None else tokens[np.asarray(self._files) == file].sum())

    def drop(self, dead: Iterable[int]) -> list[Place]:
        """Drop rows; returns what they held."""
        places = []
        for row in dead:
            places.append(self.place(row))
            problem = self._problems[row]
            rows, at = self._rows[problem], self._positions[row]
            # the last one takes its place: a problem may have all answers, and looking for one of them would take long
            rows[at] = last = rows[-1]
            self._positions[last] = at
            rows.pop()
            if not rows:
                del self._rows[problem]
            # so that no search over the columns finds it
            self._files[row], self._epochs[row], self._num_tokens[row] = _NO_FILE, _NO_EPOCH, 0
            self._free.append(row)
        return places
