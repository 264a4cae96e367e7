"""Times of a step's parts on the device's own clock, read when they are there: nobody waits for one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

EVERY = 64
"""Steps with drafts of which one is timed."""


class DeviceTimes:
    """Events around parts of some steps; there are none where the device is the host."""

    def __init__(self, device: torch.device) -> None:
        self._is_there = device.type == "cuda"
        self._steps = 0
        self._is_on = False
        # (part, its beginning, its end) in the order of the stream
        self._open: list[tuple[str, Any, Any]] = []

    def begin_step(self) -> None:
        """A step with drafts begins."""
        self._steps += 1
        self._is_on = self._is_there and self._steps % EVERY == 0

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """What is launched in here is a part of the step."""
        if not self._is_on:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._open.append((part, begin, end))

    def take(self) -> list[tuple[str, float]]:
        """(part, milliseconds) of those that are over and were not taken before."""
        over = []
        while self._open and self._open[0][2].query():
            part, begin, end = self._open.pop(0)
            over.append((part, float(begin.elapsed_time(end))))
        return over
