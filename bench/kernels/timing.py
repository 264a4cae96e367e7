"""Device time of calls, replayed from a CUDA graph with a cold cache; and the clock that stands in for it on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

Call = Callable[[], Any]
_FLUSH_BYTES = 1 << 30  # many times the L2 cache
_REPEATS = 25
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class CallTime:
    """Microseconds of one call; quartiles, since few samples say nothing about tails."""

    median_us: float
    low_us: float
    high_us: float
    samples: int

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> CallTime:
        low, median, high = statistics.quantiles(samples_us, n=4)
        return cls(median, low, high, len(samples_us))


def _all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


class GraphTimer:
    """Times calls that do the same work on different memory, as the layers of a model do, on the current CUDA device.

    All calls are captured into one graph, in order, and its replay is divided by their number: as in an engine, the
    host launches once. Before each replay a buffer larger than the L2 cache is overwritten, and each call has keys and
    values of its own, so they come from memory.
    """

    device = "cuda"

    @cached_property
    def _flush(self) -> torch.Tensor:
        return torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def time(self, calls: Sequence[Call]) -> CallTime:
        for _ in range(_WARM_UP):
            _all(calls)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _all(calls)
        graph.replay()
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPEATS)]
        for begin, end in marks:
            self._flush.zero_()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return CallTime.of([begin.elapsed_time(end) * 1e3 / len(calls) for begin, end in marks])


class HostTimer:
    """The host's clock, few repeats: to walk through the code on a CPU. Its figures mean nothing."""

    device = "cpu"

    def time(self, calls: Sequence[Call]) -> CallTime:
        samples = []
        for _ in range(2):
            begin = time.perf_counter()
            _all(calls)
            samples.append((time.perf_counter() - begin) * 1e6 / len(calls))
        return CallTime.of(samples)
