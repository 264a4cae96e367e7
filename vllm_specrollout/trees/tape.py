"""Tapes: a request's sampling noise, drawn ahead.

Stock vLLM on CPU draws one integer per sampled token from the request's generator and seeds that token's Gumbel noise
with it. A draft needs the integers of several positions at once, and gives back those it did not use: the tape keeps
them in order, so the k-th token of a request always gets the k-th integer, drafted or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

SeedArray = npt.NDArray[np.int64]
V = TypeVar("V")

_CHUNK = 64  # one call to the generator costs as much for 64 integers as for one


class SeedTape:
    """Integers drawn from a request's generator and not consumed yet."""

    __slots__ = ("_draw", "_drawn", "_next")

    def __init__(self, draw: Callable[[int], SeedArray]) -> None:
        """`draw(n)` yields the generator's next n integers, int64 [n], as n single draws would."""
        self._draw = draw
        self._drawn: SeedArray = np.empty(0, dtype=np.int64)
        self._next = 0

    def peek(self, count: int) -> SeedArray:
        """The integers of the next `count` tokens, [count]; they stay on the tape."""
        missing = self._next + count - len(self._drawn)
        if missing > 0:
            self._drawn = np.concatenate([self._drawn[self._next :], self._draw(max(missing, _CHUNK))])
            self._next = 0
        return self._drawn[self._next : self._next + count]

    def advance(self, count: int) -> None:
        """`count` tokens were kept: their integers are used up. They must have been peeked at before."""
        assert self._next + count <= len(self._drawn)
        self._next += count

    def skip(self, count: int) -> None:
        """`count` tokens were kept elsewhere, before this tape began."""
        self.peek(count)
        self.advance(count)


class VectorTape(Generic[V]):
    """The same for noise that is too large to draw in advance: one vector per token, drawn when first looked at."""

    __slots__ = ("_draw", "_drawn")

    def __init__(self, draw: Callable[[], V]) -> None:
        """`draw()` yields the noise of the next token."""
        self._draw = draw
        self._drawn: deque[V] = deque()

    def peek(self, count: int) -> list[V]:
        """The noise of the next `count` tokens; it stays on the tape."""
        while len(self._drawn) < count:
            self._drawn.append(self._draw())
        return list(islice(self._drawn, count))

    def advance(self, count: int) -> None:
        """`count` tokens were kept: their noise is used up. It must have been peeked at before."""
        assert count <= len(self._drawn)
        for _ in range(count):
            self._drawn.popleft()

    def skip(self, count: int) -> None:
        """`count` tokens were kept elsewhere, before this tape began; one vector is held at a time."""
        for _ in range(count):
            self.peek(1)
            self.advance(1)
