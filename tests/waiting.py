"""Waiting for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], patience_s: float = 60.0) -> None:
    end = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
