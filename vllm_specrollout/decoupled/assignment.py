"""Which drafting method a freed worker gets, and which requests it serves beside their first worker.

Source: SpecActor, section 4.2, Algorithm 3 (greedy Best-of-N). As printed it loops over methods, so the worst requests
of one method come before any of the next. The text says depth first: all methods for the worst request, then for the
next one. This follows the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from vllm_specrollout.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of the ladder: one drafter, and the verifier of its requests."""

    method: str
    # requests it serves
    load: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What Algorithm 3 adds."""

    # freed worker -> the method it gets
    methods: Mapping[str, str]
    # (request, method) -> the worker that serves it
    pairs: Mapping[tuple[str, str], str]
    # requests that got no worker, though there is a method they lack; lowest acceptance first
    left_out: tuple[str, ...]


def assign(
    acceptance: Mapping[str, float],
    methods: Sequence[str],
    freed: Sequence[str],
    workers: Mapping[str, Worker],
    *,
    most: int,
    running: Collection[tuple[str, str]] = (),
    may_serve: Callable[[str, str], bool] = lambda worker, request: True,
) -> Assignment:
    """Algorithm 3.

    Each freed worker gets the method that fewest workers have. Then requests are served, the one with the lowest
    acceptance first: by each method that it lacks and some worker has, on that method's least loaded worker. A method
    whose workers are full is skipped for this request.

    Args:
        acceptance: active request -> share of its drafted tokens that was accepted.
        methods: candidates; of equally rare ones the first is taken, so best first.
        freed: workers without a method.
        workers: worker -> what it does, for those that have a method already.
        most: b_max, requests of a worker.
        running: (request, method) pairs that are served already, on whatever worker.
        may_serve: whether a worker may serve a request at all.

    Raises:
        ConfigError: names that clash, or no method.
    """
    _check(methods, freed, workers, most)
    count = {method: sum(worker.method == method for worker in workers.values()) for method in methods}
    given: dict[str, str] = {}
    for name in freed:
        method = min(methods, key=count.__getitem__)
        given[name] = method
        count[method] += 1
    load = {name: worker.load for name, worker in workers.items()} | dict.fromkeys(given, 0)
    having: dict[str, list[str]] = {method: [] for method in methods}
    for name, method in [*((name, worker.method) for name, worker in workers.items()), *given.items()]:
        having.setdefault(method, []).append(name)
    pairs: dict[tuple[str, str], str] = {}
    left_out = []
    for request in sorted(acceptance, key=acceptance.__getitem__):
        lacking = [method for method in methods if (request, method) not in running]
        before = len(pairs)
        for method in lacking:
            able = [name for name in having[method] if may_serve(name, request)]
            worker = min(able, key=load.__getitem__, default=None)
            if worker is not None and load[worker] < most:
                pairs[request, method] = worker
                load[worker] += 1
        if lacking and len(pairs) == before:
            left_out.append(request)
    return Assignment(given, pairs, tuple(left_out))


def _check(methods: Sequence[str], freed: Sequence[str], workers: Mapping[str, Worker], most: int) -> None:
    if not methods or len(set(methods)) != len(methods):
        raise ConfigError("no drafting method is given, or one twice", "name each method once")
    if len(set(freed)) != len(freed) or not workers.keys().isdisjoint(freed):
        raise ConfigError("a freed worker is named twice, or has a method already", "name each worker once")
    if most < 1:
        raise ConfigError(f"a worker may serve {most} requests", "choose 1 or more")
