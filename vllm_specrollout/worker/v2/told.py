"""What the host knows of the requests that run, in rows that go to the device as they are.

What belongs here: a request's row is written when something of it has changed, and a step takes the rows of its batch.
So a step's work on the host does not grow with what is known of each request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_specrollout.types import IntArray

SIBLINGS, ENDS = (0, 7, 63), (1, 4, 16, 64)
"""Columns for running requests whose tokens are looked at beside a request's own, and for tokens that end it. Kernels
are compiled for each of these numbers; who has more siblings than the last one goes without the others."""


class Told(NamedTuple):
    """What is known of one request."""

    # row of its problem's earlier answers; -1: there are none
    problem: int
    # names of running requests whose answers draft for it
    siblings: Sequence[str]
    # tokens that end it, which are not drafted
    ends: IntArray
    # most nodes; 0: nothing is drafted
    limit: int
    # no branches
    is_chain: bool


NOBODY = Told(-1, (), np.zeros(0, np.int32), 0, True)


class Asked(NamedTuple):
    """Whom a step drafts for, in batch order."""

    # [R] row of each request
    rows: npt.NDArray[np.int64]
    # [R, 2 + siblings] int32 rows of the request, of its problem, and of its siblings, -1 where there are none
    texts: IntArray
    # [R] int32 most nodes; [R] int32 whether they may branch
    limits: IntArray
    branches: IntArray
    # [R, some] int32 tokens that end each, -1 where there are fewer
    ends: IntArray


class ToldRows:
    """Rows of all requests that run.

    Args:
        rows: requests that may run at once.
        row_of: request -> its row.
        tell: what is known of a request.
    """

    def __init__(self, rows: int, row_of: Mapping[str, int], tell: Callable[[str], Told]) -> None:
        self._row_of, self._tell = row_of, tell
        # [rows, 2 + most siblings] int32 as in `Asked`, [rows] how many siblings, and the like
        self._texts = np.full((rows, 2 + SIBLINGS[-1]), -1, dtype=np.int32)
        self._texts[:, 0] = np.arange(rows)
        self._siblings, self._limits = np.zeros(rows, dtype=np.int32), np.zeros(rows, dtype=np.int32)
        self._branches = np.zeros(rows, dtype=np.bool_)
        self._ends = np.full((rows, ENDS[0]), -1, dtype=np.int32)

    def renew(self, request_ids: Iterable[str]) -> None:
        """Something of these has changed; those that do not run are passed over."""
        for name in request_ids:
            if (row := self._row_of.get(name)) is None:
                continue
            problem, siblings, ends, limit, is_chain = self._tell(name)
            own = [other for one in siblings if (other := self._row_of.get(one)) is not None][: SIBLINGS[-1]]
            self._texts[row, 1:] = -1
            self._texts[row, 1], self._texts[row, 2 : 2 + len(own)] = problem, own
            self._siblings[row], self._limits[row], self._branches[row] = len(own), limit, not is_chain
            if (more := len(ends) - self._ends.shape[1]) > 0:
                columns = next((n for n in ENDS if n >= len(ends)), 1 << (len(ends) - 1).bit_length())
                more = columns - self._ends.shape[1]
                self._ends = np.pad(self._ends, ((0, 0), (0, more)), constant_values=-1)
            self._ends[row] = -1
            self._ends[row, : len(ends)] = ends

    def asked(self, rows: npt.NDArray[np.int64], most: int, *, may_branch: bool) -> Asked:
        """Those of a batch.

        Args:
            rows: [R] each request's.
            most: nodes of any request.
        """
        crowd = int(self._siblings[rows].max())
        columns = 2 + next(n for n in SIBLINGS if n >= crowd)
        branches = (self._branches[rows] & may_branch).astype(np.int32)
        limits = np.minimum(self._limits[rows], most)
        return Asked(rows, self._texts[rows, :columns], limits, branches, self._ends[rows])
