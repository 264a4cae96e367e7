"""Assignment of freed workers to the requests that they serve beside their first worker.

A freed worker runs the requests itself (`assign`), or lends its drafter to the workers that run them (`lend`).

Source: SpecActor, section 4.2, Algorithm 3 (greedy Best-of-N). As printed it loops over methods, so the worst requests
of one method come before any of the next. The text says depth first: all methods for the worst request, then for the
next one. This follows the text.
"""

from __future__ import annotations

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
    load = {name: worker.load for name, worker in workers.items()}
    having: dict[str, list[str]] = {method: [] for method in methods}
    for name, worker in workers.items():
        having.setdefault(worker.method, []).append(name)
    pairs: dict[tuple[str, str], str] = {}
    for request in sorted(acceptance, key=acceptance.__getitem__):
        for method in (method for method in methods if (request, method) not in running):
            chosen = min(having[method], key=load.__getitem__, default=None)
            if chosen is not None and load[chosen] < most:
                pairs[request, method] = chosen
                load[chosen] += 1
    return pairs


@dataclass(frozen=True, slots=True)
class Lender:
    """A worker without requests, whose drafter may draft for another one's."""

    # of its drafter: two of one method draft the same
    method: str
    # the worker that it drafts for; empty: it is free
    to: str = ""
    requests: tuple[str, ...] = ()


def lend(
    running: Mapping[str, Mapping[str, float]],
    lenders: Mapping[str, Lender],
    *,
    most: int,
) -> Mapping[str, Lender]:
    """Algorithm 3 for drafters that are lent: several methods for one request, united in its worker's one tree.

    Depth first: the request with the lowest acceptance gets each method that it lacks, before the next request does. A
    drafter drafts for one worker at a time. So one that its worker has already is taken first, and a free one where
    enough are left for the other workers that have none of its method.

    Args:
        running: worker -> its active requests, with the share of their drafted tokens that was accepted.
        lenders: idle worker -> what its drafter does now.
        most: b_max, requests of a drafter.

    Returns:
        The lenders that are to do something else, with all that they are to do.
    """
    now = dict(lenders)
    methods = list(dict.fromkeys(one.method for one in lenders.values()))
    active = [(rate, worker, request) for worker, own in running.items() for request, rate in own.items()]
    for _, worker, request in sorted(active, key=lambda one: one[0]):
        having = {one.method for one in now.values() if one.to == worker and request in one.requests}
        for method in methods:
            name = None if method in having else _lender(now, running, worker, method, most)
            if name is not None:
                now[name] = Lender(method, worker, (*now[name].requests, request))
    return {name: one for name, one in now.items() if one != lenders[name]}


def _lender(
    now: Mapping[str, Lender], running: Mapping[str, Mapping[str, float]], worker: str, method: str, most: int
) -> str | None:
    """Whose drafter of this method takes one more request of a worker; None: nobody's."""
    same = {name: one for name, one in now.items() if one.method == method}
    own = [name for name, one in same.items() if one.to == worker and len(one.requests) < most]
    free = [name for name, one in same.items() if not one.to]
    served = {worker, *(one.to for one in same.values())}
    others = sum(bool(requests) and name not in served for name, requests in running.items())
    chosen = own + free if len(free) > others else own or free
    return min(chosen, key=lambda name: len(same[name].requests), default=None)
