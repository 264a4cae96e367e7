"""Which freed groups race for which requests.

Source: SpecActor, section 4.2, Algorithm 3 (greedy Best-of-N). A request gets each method at most once, since a second
copy with the same drafter would end at the same time. Which method a freed group gets is `assignment.rarest`. The rest
differs from `decoupled/assignment.py`, which engines use, and why:

- The printed loop is kept here, as the study is of what the paper prints: by methods, and all requests of one method
  come before any of the next. Engines go depth first, as its text says.
- Groups of a method are filled one behind another, as printed. Engines spread requests, least loaded first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Race:
    """A copy of a request that a group takes on."""

    request: int
    method: int
    group: int


def assign(
    rates: Mapping[int, float],
    racing: Mapping[int, int],
    loads: Mapping[int, int],
    taken: Collection[tuple[int, int]],
    most: int,
) -> list[Race]:
    """Fill groups that race, lowest acceptance first (lines 4 to 10).

    Args:
        rates: request that still runs -> acceptance measured so far.
        racing: group that races -> its method.
        loads: group -> requests it runs.
        taken: (request, method) pairs that run already.
        most: requests per group, the paper's b_max.
    """
    order = sorted(rates, key=lambda request: (rates[request], request))
    found = []
    for method in dict.fromkeys(racing.values()):
        waiting = [request for request in order if (request, method) not in taken]
        for group in (group for group, own in racing.items() if own == method):
            room = max(most - loads.get(group, 0), 0)
            found += [Race(request, method, group) for request in waiting[:room]]
            waiting = waiting[room:]
    return found
