"""Where a store does what takes long. Nothing about what that is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Background = Callable[[Callable[[], None]], object]


def run_now(task: Callable[[], None]) -> None:
    """The background of who has none."""
    task()


def one_thread() -> Background:
    """A background for a store that must not hold its caller up."""
    return ThreadPoolExecutor(1, "specrollout-history-store").submit
