"""The requests that one verifier runs, as arrays with one entry per request: where each stands, what is drafted for it.

A request may run in several groups at once; each of them has its own copy. All copies yield the same tokens.
"""

from __future__ import annotations

import numpy as np

from vllm_specrollout.cluster.simulate.workload import Floats, Ints


class Copies:
    """Arrays of one group, all [R]; R changes as requests come and go."""

    __slots__ = ("ahead", "ids", "is_decoupled", "left", "position", "window")

    def __init__(self) -> None:
        # [R] request number, int
        self.ids: Ints = np.empty(0, dtype=np.int64)
        # [R] tokens generated so far, int
        self.position: Ints = np.empty(0, dtype=np.int64)
        # [R] draft tokens of a whole window, int
        self.window: Ints = np.empty(0, dtype=np.int64)
        # [R] whether the drafter goes on while a window is verified
        self.is_decoupled = np.empty(0, dtype=bool)
        # [R] tokens drafted beyond `position`; a part of a token is one in the making
        self.ahead: Floats = np.empty(0)
        # [R] tokens beyond `position` that complete the window being drafted, 1 to `window`, int
        self.left: Ints = np.empty(0, dtype=np.int64)

    @property
    def size(self) -> int:
        return len(self.ids)

    def add(self, ids: Ints, position: Ints, window: int, is_decoupled: bool) -> None:
        """Put requests behind those that run; nothing is drafted for them yet."""
        count = len(ids)
        self.ids = np.concatenate([self.ids, ids])
        self.position = np.concatenate([self.position, position])
        self.window = np.concatenate([self.window, np.full(count, window, dtype=np.int64)])
        self.is_decoupled = np.concatenate([self.is_decoupled, np.full(count, is_decoupled)])
        self.ahead = np.concatenate([self.ahead, np.zeros(count)])
        self.left = np.concatenate([self.left, np.full(count, window, dtype=np.int64)])

    def keep(self, mask: np.ndarray) -> None:
        """Drop the requests whose entry of `mask` ([R], bool) is false."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name)[mask])

    def reconfigure(self, window: Ints, is_decoupled: np.ndarray) -> None:
        """Give each request a window and a mode; of a window that is longer than wanted the rest is dropped."""
        self.window, self.is_decoupled = window, is_decoupled
        self.left = np.minimum(self.left, window)
        self.ahead = np.minimum(self.ahead, self.most_ahead())

    def most_ahead(self) -> Ints:
        """[R] how far the drafter may go: to the end of its window, and, decoupled, one window further."""
        return self.left + np.where(self.is_decoupled, self.window, 0)
