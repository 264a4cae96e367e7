"""Checks of a soak: growth after it has settled, requests, drafts, and stock's answers.

Of a series, medians of the first and of the last quarter are compared: one large request body moves neither.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..runner.engines import STOCK, Engines
from ..runner.fields import Row
from ..runner.rows import Run, partings
from ..runner.server import Holding
from ..runner.ties import asked
from .drive import Observations, Sample
from .load import Reply

LEAST_SAMPLES = 8
"""Of a shorter series nothing is judged."""
MORE_FILES, MORE_SOCKETS = 2, 2
"""Handles that may be open besides: a file that is being rewritten, a folder that is being listed."""
_AT_ONCE = 64


def judged(name: str, value: float, limit: float, unit: str = "") -> Row:
    """A number that must not be above its limit."""
    return Row(name=name, unit=unit, value=value, limit=limit, passed=value <= limit)


def grown(
    name: str, unit: str, samples: Sequence[tuple[float, float]], settled_s: float, limit: float, *, is_share: bool
) -> Row:
    """From the first to the last quarter of what was seen from `settled_s` on.

    Args:
        samples: seconds, and what is watched.
        is_share: growth is judged as a share, not as a difference.
    """
    kept = [value for at, value in samples if at >= settled_s]
    if len(kept) < LEAST_SAMPLES:
        return Row(name=name, unit=unit, value=None, limit=limit, detail="too short to judge")
    quarter = len(kept) // 4
    first, last = statistics.median(kept[:quarter]), statistics.median(kept[-quarter:])
    value = last / max(first, 1e-9) - 1.0 if is_share else last - first
    return Row(name=name, unit=unit, first=first, last=last, value=value, limit=limit, passed=value <= limit)


def _series(samples: Sequence[Sample], of: Callable[[Holding], float]) -> dict[str, list[tuple[float, float]]]:
    """Role -> what is watched of it."""
    roles = dict.fromkeys(role for sample in samples for role in sample.holdings)
    return {role: [(s.at_s, of(s.holdings[role])) for s in samples if role in s.holdings] for role in roles}


def memory(samples: Sequence[Sample], settled_s: float, limit: float) -> list[Row]:
    """Resident memory of each role, and of all together."""
    series = _series(samples, lambda one: one.rss_mib)
    series["all processes"] = [(s.at_s, sum(one.rss_mib for one in s.holdings.values())) for s in samples]
    return [grown(f"memory, {role}", "MiB", own, settled_s, limit, is_share=True) for role, own in series.items()]


def handles(outcome: Observations, settled_s: float) -> list[Row]:
    """Files while requests run; sockets before the first and after the last one, as each client has one meanwhile."""
    series = _series(outcome.samples, lambda one: float(one.files))
    found = [grown(f"files, {r}", "open", own, settled_s, MORE_FILES, is_share=False) for r, own in series.items()]
    if outcome.idle is not None:
        first, last = (sum(one.sockets for one in sample.holdings.values()) for sample in outcome.idle)
        check = judged("sockets, idle", last - first, MORE_SOCKETS, "open")
        found.append(check.but(first=float(first), last=float(last)))
    return found


def disk(samples: Sequence[Sample], limit_mib: float) -> Row:
    return judged("disk, history", max((sample.disk_mib for sample in samples), default=0.0), limit_mib, "MiB")


def requests(outcome: Observations, is_alive: bool) -> list[Row]:
    """None lost, none left behind, and the server still there."""
    counts = outcome.requests
    left = outcome.idle[1].counts if outcome.idle is not None else {}
    held = left.get("running", float("inf")) + left.get("waiting", float("inf"))
    return [
        *(Row(name=f"requests {kind}", value=counts[kind]) for kind in ("answered", "left", "late")),
        judged("requests lost", counts["lost"], 0),
        judged("requests still in the server", held, 0),
        judged("servers that died", float(not is_alive), 0),
    ]


def drafting(outcome: Observations) -> list[Row]:
    """That drafts went on to the end, faults or not; and what the other routes answered."""
    counted = [sample.counts for sample in outcome.samples if sample.counts]
    end = counted[-1] if counted else {}
    late = counted[-max(1, len(counted) // 4) :]
    since = late[-1]["drafted"] - late[0]["drafted"] if len(late) > 1 else end.get("drafted", 0.0)
    told = {
        "failures of drafters": end.get("failures", 0.0),
        "preemptions": end.get("preemptions", 0.0),
        "writes of the history that failed": outcome.samples[-1].write_errors if outcome.samples else 0.0,
        **{f"rewards {kind}": outcome.routes[f"rewards {kind}"] for kind in ("matched", "unknown")},
    }
    last = Row(name="drafted in the last quarter", unit="nodes", value=since, limit=1, passed=since >= 1)
    return [
        *(Row(name=name, unit="nodes", value=end.get(name, 0.0)) for name in ("drafted", "accepted")),
        last.but(detail="at least"),
        *(Row(name=name, value=value) for name, value in told.items()),
        judged("wrong answers of other routes", outcome.routes["wrong"], 0),
    ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How answers compare with those of a stock engine, which is asked again once the server is gone."""

    answers: int
    tokens: int
    # in words: differences within rounding, proven, and others
    ties: tuple[str, ...]
    differences: tuple[str, ...]


def compare(
    engines: Engines, answers: Sequence[Reply], max_tokens: int, dtype: str, report: Callable[[int, int], None]
) -> Comparison:
    """Ask stock for all of them; its engine was started with `JUDGE`.

    Args:
        report: told of answers done, and of all.
    """
    # vLLM makes requests of the answers that a request wants, with a seed each, counted up
    singles = [(answer, i) for answer in answers for i in range(len(answer.tokens))]
    ties: list[str] = []
    differences: list[str] = []
    for begin in range(0, len(singles), _AT_ONCE):
        some = singles[begin : begin + _AT_ONCE]
        prompts = [answer.prompt for answer, _ in some]
        params: list[dict[str, Any]] = [
            {**answer.arrival.sampling(max_tokens), "seed": answer.arrival.seed + i} for answer, i in some
        ]
        wanted = Run.from_child(engines[STOCK].ask("generate", prompts=prompts, params=params))
        found = replace(wanted, token_ids=tuple(tuple(answer.tokens[i]) for answer, i in some))
        for parting in partings(wanted, found):
            one, (answer, i) = parting.request, some[parting.request]
            is_tie, why = asked(engines[STOCK], prompts[one], params[one], answer.tokens[i], parting, dtype)
            who = f"request {answer.arrival.number} ({answer.arrival.kind}), answer {i}"
            text = f"{who}, token {parting.position}: stock {parting.stock}, ours {parting.ours}, {why}"
            (ties if is_tie else differences).append(text)
        report(begin + len(some), len(singles))
    tokens = sum(len(answer.tokens[i]) for answer, i in singles)
    return Comparison(len(singles), tokens, tuple(ties), tuple(differences))


def answers(verdict: Comparison) -> Row:
    """All that were compared are stock's, floating-point ties apart."""
    count = len(verdict.differences)
    told = f"{verdict.answers} answers, {verdict.tokens} tokens compared, {len(verdict.ties)} proven ties"
    return judged("answers that are not stock's", count, 0).but(identical=count == 0, detail=told)
