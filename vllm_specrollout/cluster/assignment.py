"""Assignment of freed workers to the requests that they serve beside their first worker.

A freed worker runs the requests itself, or lends its drafter to the workers that run them.

Source: SpecActor, section 4.2, Algorithm 3 (greedy Best-of-N). As printed it loops over methods, so the worst requests
of one method come before any of the next. The text says depth first: all methods for the worst request, then for the
next one. This follows the text.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of the ladder: one drafter, and the verifier of its requests."""

    method: str
    # requests it serves
    load: int = 0


def assign(
    acceptance: Mapping[str, float],
    methods: Sequence[str],
    workers: Mapping[str, Worker],
    *,
    most: int,
    running: Collection[tuple[str, str]] = (),
) -> Mapping[tuple[str, str], str]:
    """Algorithm 3.

    The request with the lowest acceptance is served first: by each method that it lacks and some worker has, on that
    method's least loaded worker. A method whose workers are full is skipped for this request.

    Args:
        acceptance: active request -> share of its drafted tokens that was accepted, or what goes with it.
        methods: candidates, each once, best first.
        workers: worker -> what it does.
        most: b_max, requests of a worker, 1 or more.
        running: (request, method) pairs that are served already, on whatever worker.

    Returns:
        (request, method) -> the worker that is to serve it. A worker may get no request.
    """
    # method -> (load, order, name) of its workers that have places, the least loaded first
    free: dict[str, list[tuple[int, int, str]]] = {method: [] for method in methods}
    for order, (name, worker) in enumerate(workers.items()):
        if worker.load < most and worker.method in free:
            free[worker.method].append((worker.load, order, name))
    for heap in free.values():
        heapq.heapify(heap)
    pairs: dict[tuple[str, str], str] = {}
    for request in sorted(acceptance, key=acceptance.__getitem__) if any(free.values()) else ():
        for method in (method for method in methods if free[method] and (request, method) not in running):
            load, order, chosen = free[method][0]
            pairs[request, method] = chosen
            if load + 1 < most:
                heapq.heapreplace(free[method], (load + 1, order, chosen))
            else:
                heapq.heappop(free[method])
    return pairs
