"""Assignment of a freed worker: its drafting method, and the requests it serves beside their first worker.

A freed worker may run the requests themselves (`assign`), or lend its drafter to the workers that run them (`lend`).

Source: SpecActor, section 4.2, Algorithm 3 (greedy Best-of-N). As printed it loops over methods, so the worst requests
of one method come before any of the next. The text says depth first: all methods for the worst request, then for the
next one. This follows the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Method = TypeVar("Method")


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of the ladder: one drafter, and the verifier of its requests."""

    method: str
    # requests it serves
    load: int = 0


def assign(
    acceptance: Mapping[str, float],
    methods: Sequence[str],
    freed: Sequence[str],
    workers: Mapping[str, Worker],
    *,
    most: int,
    running: Collection[tuple[str, str]] = (),
    may_serve: Callable[[str, str], bool] = lambda worker, request: True,
) -> Mapping[tuple[str, str], str]:
    """Algorithm 3.

    Each freed worker gets the method that fewest workers have. Then requests are served, the one with the lowest
    acceptance first: by each method that it lacks and some worker has, on that method's least loaded worker. A method
    whose workers are full is skipped for this request.

    Args:
        acceptance: active request -> share of its drafted tokens that was accepted.
        methods: candidates, each once; of equally rare ones the first is taken, so best first.
        freed: workers without a method, none of which is in `workers`.
        workers: worker -> what it does, for those that have a method already.
        most: b_max, requests of a worker, 1 or more.
        running: (request, method) pairs that are served already, on whatever worker.
        may_serve: whether a worker may serve a request at all.

    Returns:
        (request, method) -> the worker that is to serve it. A freed worker may get no request.
    """
    count = {method: sum(worker.method == method for worker in workers.values()) for method in methods}
    given: dict[str, str] = {}
    for name in freed:
        method = rarest(methods, count)
        given[name] = method
        count[method] += 1
    load = {name: worker.load for name, worker in workers.items()} | dict.fromkeys(given, 0)
    having: dict[str, list[str]] = {method: [] for method in methods}
    for name, method in [*((name, worker.method) for name, worker in workers.items()), *given.items()]:
        having.setdefault(method, []).append(name)
    pairs: dict[tuple[str, str], str] = {}
    for request in sorted(acceptance, key=acceptance.__getitem__):
        for method in (method for method in methods if (request, method) not in running):
            able = [name for name in having[method] if may_serve(name, request)]
            worker = min(able, key=load.__getitem__, default=None)
            if worker is not None and load[worker] < most:
                pairs[request, method] = worker
                load[worker] += 1
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


def rarest(methods: Sequence[Method], count: Mapping[Method, int]) -> Method:
    """What a freed worker gets: the method that fewest workers have, the first of several (lines 1 to 3).

    Args:
        count: workers of each; none where it is left out.
    """
    return min(methods, key=lambda method: count.get(method, 0))
