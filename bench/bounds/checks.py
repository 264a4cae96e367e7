"""What has to hold, and whether it did. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_specrollout.history.store import PER_MIB

from .posts import Posted
from .problems import Held


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing, measured and judged."""

    what: str
    name: str
    unit: str
    value: float
    # None: told, not judged
    limit: float | None = None
    passed: bool | None = None


def judged(what: str, name: str, unit: str, value: float, limit: float) -> Row:
    """A number that must be below its limit."""
    return Row(what=what, name=name, unit=unit, value=value, limit=limit, passed=value < limit)


def of_problems(
    what: str, held: Sequence[Held], max_mib: int, growth_mib: float | None, disk_mib: int | None
) -> list[Row]:
    """Of two samples: after the first problems, and at the end.

    Args:
        max_mib: `history.max_mib`, which says how many answers are known at most.
        growth_mib: the limit between the two; None: told, with what an answer takes.
        disk_mib: `history.max_disk_mib`; None: answers are in memory.
    """
    first, last = held
    growth, name = last.rss_mib - first.rss_mib, f"growth after {first.problems:,} problems"
    rows = [Row(what=what, name=f"memory after {last.problems:,} problems", unit="MiB", value=last.rss_mib)]
    if growth_mib is not None:
        rows.append(judged(what, name, "MiB", growth, growth_mib))
    else:
        each = growth * 2**20 / max(1, last.answers - first.answers)
        rows.append(Row(what=what, name=name, unit="MiB", value=growth))
        # not to be multiplied by all answers: of indices there are fewer, 128 for each MiB
        rows.append(Row(what=what, name="an answer and its index", unit="bytes", value=each))
    # one for each call that makes room at once
    most = max_mib * PER_MIB
    rows.append(
        Row(what=what, name="answers known", unit="", value=last.answers, limit=most, passed=last.answers <= most)
    )
    rows.append(judged(what, "indices", "MiB", last.index_mib, max_mib))
    if disk_mib is not None:
        rows.append(judged(what, "disk", "MiB", max(one.disk_mib for one in held), disk_mib))
    return rows


def of_posts(posted: Posted, blocked_ms: float, growth_mib: float) -> list[Row]:
    """Of one kind of body; or, of none, what the host does to a loop that has nothing to do."""
    blocked = statistics.median(posted.blocked_ms)
    if not posted.kind:
        return [Row(what="no body", name="event loop stands still", unit="ms", value=blocked)]
    what = f"{posted.kind}, {posted.num_bytes / 1e6:.1f} MB, {posted.status}"
    return [
        judged(what, "event loop stands still", "ms", blocked, blocked_ms),
        judged(what, "memory", "MiB", posted.peak_mib, growth_mib),
        Row(what=what, name="answered after", unit="ms", value=statistics.median(posted.took_ms)),
    ]
