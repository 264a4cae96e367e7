"""Long work under a lock that others want as well: a few things at a time. stdlib only."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

AT_ONCE = 500
"""Answers that are dealt with before others may have the lock: a millisecond or two."""
# a lock that is released and taken again at once is never handed over: who waits for it has to wake up first
_MOMENT_S = 1e-4

T = TypeVar("T")


def parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """All the items in their order, a few at a time, for each of which the caller takes its lock anew."""
    for start in range(0, len(items), AT_ONCE):
        if start:
            time.sleep(_MOMENT_S)
        yield items[start : start + AT_ONCE]
