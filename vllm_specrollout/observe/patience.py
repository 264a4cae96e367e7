"""Waiting for a thread that writes to a disk: as long as it makes progress. stdlib only."""

from __future__ import annotations

import threading
from collections.abc import Callable

PATIENCE_S = 10.0
"""Seconds without any progress after which a thread is left to itself, and what it was to do is lost."""


def wait_for(thread: threading.Thread, progress: Callable[[], int], patience_s: float) -> bool:
    """Wait for the end of a thread as long as it gets on; returns whether it came.

    Args:
        progress: a number that changes when it does.
    """
    before: int | None = None
    while thread.is_alive() and (now := progress()) != before:
        before = now
        thread.join(patience_s)
    return not thread.is_alive()
