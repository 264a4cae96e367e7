"""Device time of a call, from CUDA events, with a cold cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

_FLUSH_BYTES = 1 << 30  # many times the L2 cache, and a quarter of a millisecond in which the host launches
_COPY_BYTES = 4 << 30
_REPEATS = 25
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Time:
    """Microseconds on the device; quartiles, since few samples say nothing about tails."""

    median_us: float
    low_us: float
    high_us: float
    samples: int

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Time:
        low, median, high = statistics.quantiles(samples_us, n=4)
        return cls(median, low, high, len(samples_us))


class Timer:
    """Times calls on the current CUDA device.

    Before each call a buffer larger than the L2 cache is overwritten, so keys and values come from memory, as they do
    in an engine, where a whole model runs between two calls of one layer. The overwriting also keeps the device busy
    while the host launches what is timed, so host time does not count.
    """

    @cached_property
    def _flush(self) -> torch.Tensor:
        return torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def time(self, call: Callable[[], Any], repeats: int = _REPEATS) -> Time:
        for _ in range(_WARM_UP):
            call()
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in marks:
            self._flush.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return Time.of([begin.elapsed_time(end) * 1e3 for begin, end in marks])

    def copy_bandwidth(self) -> float:
        """Bytes per second, read and written, of a large copy within the device: the roof of memory-bound kernels."""
        source = torch.empty(_COPY_BYTES, dtype=torch.int8, device="cuda")
        target = torch.empty_like(source)
        time = self.time(lambda: target.copy_(source))
        return 2 * _COPY_BYTES / (time.median_us * 1e-6)
