"""Algorithm 3 as its text has it: see `cluster/ladder.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def assign(
    acceptance: Mapping[str, float],
    methods: Sequence[str],
    workers: list[tuple[str, str, int]],
    most: int,
    running: set[tuple[str, str]],
) -> tuple[list[tuple[str, str, int]], dict[tuple[str, str], str]]:
    """Args: workers, (name, method, load) of each. Returns: the same afterwards, and what was assigned."""
    pairs = {}
    for request in sorted(acceptance, key=lambda name: acceptance[name]):
        for method in methods:
            free = [w for w in workers if w[1] == method and w[2] < most]
            if (request, method) in running or not free:
                continue
            name, _, load = min(free, key=lambda w: w[2])
            pairs[request, method] = name
            workers = [(name, method, load + 1) if w[0] == name else w for w in workers]
    return workers, pairs
