"""What a soak has to hold, and whether it did. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .answers import Verdict
from .drive import Outcome, Sample
from .growth import growth

MORE_FILES = 2
"""Handles that may be open besides: a file that is being rewritten, a folder that is being listed."""
MORE_SOCKETS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing, measured and judged."""

    name: str
    unit: str
    # at the beginning, where there is one, and at the end
    first: float | None = None
    last: float | None = None
    # what is judged: a share for memory, a count for all else
    value: float | None
    limit: float | None
    # per hour, of the least-squares line: told, not judged
    slope: float | None = None
    # None: told only, or too short a run to judge
    passed: bool | None
    # of the row of answers
    identical: bool | None = None
    detail: str = ""


def judged(name: str, unit: str, value: float, limit: float, detail: str = "") -> Check:
    """A number that must not be above its limit."""
    return Check(name=name, unit=unit, value=value, limit=limit, passed=value <= limit, detail=detail)


def told(name: str, unit: str, value: float) -> Check:
    return Check(name=name, unit=unit, value=value, limit=None, passed=None)


def memory(samples: Sequence[Sample], settled_s: float, limit: float) -> list[Check]:
    """Resident memory of each role, and of all together."""
    roles = dict.fromkeys(role for sample in samples for role in sample.holdings)
    series = {role: [(s.at_s, s.holdings[role].rss_mib) for s in samples if role in s.holdings] for role in roles}
    series["all processes"] = [(s.at_s, sum(one.rss_mib for one in s.holdings.values())) for s in samples]
    checks = []
    for role, pairs in series.items():
        found = growth([at for at, _ in pairs], [value for _, value in pairs], settled_s)
        checks.append(
            Check(
                name=f"memory, {role}",
                unit="MiB",
                first=found.first,
                last=found.last,
                value=found.share,
                limit=limit,
                slope=found.slope,
                passed=None if found.share is None else found.share <= limit,
                detail="" if found.share is not None else "too short to judge",
            )
        )
    return checks


def handles(outcome: Outcome, settled_s: float) -> list[Check]:
    """Files while requests run; sockets before the first and after the last one, as each client has one meanwhile."""
    checks, samples = [], outcome.samples
    for role in dict.fromkeys(role for sample in samples for role in sample.holdings):
        pairs = [(s.at_s, float(s.holdings[role].files)) for s in samples if role in s.holdings]
        found = growth([at for at, _ in pairs], [value for _, value in pairs], settled_s)
        checks.append(
            Check(
                name=f"files, {role}",
                unit="open",
                first=found.first,
                last=found.last,
                value=found.difference,
                limit=MORE_FILES,
                slope=found.slope,
                passed=None if found.difference is None else found.difference <= MORE_FILES,
                detail="" if found.difference is not None else "too short to judge",
            )
        )
    if outcome.idle is not None:
        first, last = (sum(one.sockets for one in sample.holdings.values()) for sample in outcome.idle)
        more = last - first
        passed = more <= MORE_SOCKETS
        numbers = {"first": float(first), "last": float(last), "value": float(more), "limit": float(MORE_SOCKETS)}
        checks.append(Check(name="sockets, idle", unit="open", passed=passed, **numbers))
    return checks


def disk(samples: Sequence[Sample], limit_mib: float) -> Check:
    return judged("disk, history", "MiB", max((sample.disk_mib for sample in samples), default=0.0), limit_mib)


def requests(outcome: Outcome, is_alive: bool) -> list[Check]:
    """None lost, none left behind, and the server still there."""
    counts = outcome.requests
    checks = [told(f"requests {kind}", "", counts[kind]) for kind in ("answered", "left", "late")]
    checks.append(judged("requests lost", "", counts["lost"], 0))
    left = outcome.idle[1].counts if outcome.idle is not None else {}
    held = left.get("running", float("inf")) + left.get("waiting", float("inf"))
    checks.append(judged("requests still in the server", "", held, 0))
    checks.append(judged("servers that died", "", float(not is_alive), 0))
    return checks


def drafting(outcome: Outcome) -> list[Check]:
    """That drafts went on to the end, faults or not; and what the other routes answered."""
    counted = [sample for sample in outcome.samples if sample.counts]
    end = counted[-1].counts if counted else {}
    checks = [told(name, "nodes", end.get(name, 0.0)) for name in ("drafted", "accepted")]
    checks += [
        told("failures of drafters", "", end.get("failures", 0.0)),
        told("preemptions", "", end.get("preemptions", 0.0)),
    ]
    late = counted[-max(1, len(counted) // 4) :]
    since = late[-1].counts["drafted"] - late[0].counts["drafted"] if len(late) > 1 else end.get("drafted", 0.0)
    checks.append(
        Check(
            name="drafted in the last quarter", unit="nodes", value=since, limit=1, passed=since >= 1, detail="at least"
        )
    )
    kept = [sample.history for sample in outcome.samples if sample.history]
    if kept:
        checks.append(told("writes of the history that failed", "", kept[-1].get("write_errors", 0.0)))
    if outcome.trainer is not None:
        checks += [told(f"rewards {kind}", "", outcome.trainer.rewards[kind]) for kind in ("matched", "unknown")]
        checks.append(told("bodies that no route takes", "", outcome.trainer.mistakes))
    checks.append(judged("wrong answers of other routes", "", outcome.wrong_answers, 0))
    return checks


def answers(verdict: Verdict) -> Check:
    """All that were compared are stock's, floating-point ties apart."""
    count = len(verdict.differences)
    return Check(
        name="answers that are not stock's",
        unit="",
        value=count,
        limit=0,
        passed=count == 0,
        identical=count == 0,
        detail=f"{verdict.answers} answers, {verdict.tokens} tokens compared, {len(verdict.ties)} proven ties",
    )
