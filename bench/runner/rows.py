"""Runs of engines, whether two yield the same, and the rows of a report made of pairs of them. Pure.

A row whose outputs differ keeps its counts and loses every time: there is no speed of a wrong answer.

The ideal speed-up is what the hardware would allow by stock vLLM's own step times; docs/reference/bench.md says how.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from typing import Any

import msgspec
import numpy as np

from .fields import Row

StepTimes = Mapping[int, float]
"""Tokens per request -> milliseconds of a stock step, at one batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTotals:
    """Our worker's totals of one run."""

    steps: int
    drafted: int
    accepted: int
    # running requests, summed over steps
    request_steps: int
    forward_ms: float
    draft_ms: float
    # steps that accepted another branch than the first
    branches_committed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All requests of a benchmark, run to their ends by one engine."""

    # per request
    token_ids: tuple[tuple[int, ...], ...]
    # per request, seconds since the start
    finish_s: tuple[float, ...]
    # per engine step that yielded tokens: its end, seconds since the start
    step_s: tuple[float, ...]
    # our engine only
    totals: WorkerTotals | None = None
    # stock's only: where it differs from its own first run of the same requests
    itself: Parting | None = None

    @classmethod
    def from_child(cls, reply: Mapping[str, Any]) -> Run:
        """Of an engine process's answer, which may tell more than is known here."""
        return msgspec.convert(reply, cls, strict=False)

    @property
    def wall_s(self) -> float:
        """The makespan: from the first request's start to the last one's end."""
        return self.step_s[-1]

    @property
    def decode_s(self) -> float:
        """The makespan without its first step, which computes the prompts."""
        return self.step_s[-1] - self.step_s[0]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    def step_ms(self) -> list[float]:
        """Durations of all steps but the first."""
        return [(end - begin) * 1e3 for begin, end in zip(self.step_s, self.step_s[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first place at which one request's outputs differ; what comes after it has another prefix."""

    request: int
    # index into the request's output
    position: int
    # None: the output had already ended
    stock: int | None
    ours: int | None
    # of the first place where two runs part: requests that differ anywhere
    num_requests: int = 1

    def as_text(self, other: str = "ours") -> str:
        more = f" ({self.num_requests} requests differ)" if self.num_requests > 1 else ""
        return f"request {self.request}, token {self.position}: stock {self.stock}, {other} {self.ours}{more}"


def partings(stock: Run, ours: Run) -> list[Parting]:
    """Compare two runs token by token: of every request that differs, where."""
    found = []
    for request, (one, other) in enumerate(zip(stock.token_ids, ours.token_ids, strict=True)):
        if one != other:
            pairs = enumerate(zip_longest(one, other))
            at, (wanted, got) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
            found.append(Parting(request=request, position=at, stock=wanted, ours=got))
    return found


def first_difference(stock: Run, ours: Run) -> Parting | None:
    """None if two runs are identical."""
    found = partings(stock, ours)
    return replace(found[0], num_requests=len(found)) if found else None


def step_times(decode_ms: Sequence[float], extend_ms: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """t(n) from plain decode steps, and from steps that appended n tokens to cached prefixes.

    A measured extension also pays for admitting its requests, which decode steps do not. That part is the same for
    every n, so the difference from n = 1 is what counts: t(n) = decode + extend(n) - extend(1), and never less than
    for a smaller n.
    """
    base, decode = statistics.median(extend_ms[1]), statistics.median(decode_ms)
    known = sorted(extend_ms)
    times = (decode + statistics.median(extend_ms[n]) - base for n in known)
    return dict(zip(known, accumulate(times, max), strict=True))


def at(times: StepTimes, n: float) -> float:
    """t(n) between measured points: linear. Outside of them: the nearest."""
    known = sorted(times)
    return float(np.interp(n, known, [times[one] for one in known]))


def ideal_speedup(tokens_per_step: float, nodes: float, times: StepTimes) -> float:
    """tau * t(1) / t(1 + nodes); both per request and verify step."""
    return tokens_per_step * at(times, 1) / at(times, 1 + nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs of the same requests, one right after the other."""

    stock: Run
    ours: Run
    # a warm-up run counts for identity, not for time
    is_timed: bool = True


SPEEDS = (
    *("speedup", "speedup_quartiles", "ideal", "efficiency", "decode_speedup", "makespan_s", "stock_makespan_s"),
    *("tokens_per_s", "stock_tokens_per_s", "overhead_ms_per_step", "draft_ms_per_step", "stock_step_ms", "rounds_s"),
)
"""Fields of a row that are told only if outputs are identical."""
UNTOLD: Mapping[str, None] = dict.fromkeys(SPEEDS)


def make_row(name: str, batch: int, draft: int, pairs: Sequence[Pair], times: StepTimes | None = None) -> Row:
    """Sum up all pairs of one configuration.

    Args:
        times: stock's step times at this batch; None leaves `ideal` and `efficiency` out.
    """
    timed = [pair for pair in pairs if pair.is_timed]
    last, difference = timed[-1], difference_of(pairs)
    counts = _counts(last.ours)
    return Row(
        name=name,
        batch=batch,
        draft=draft,
        num_requests=len(last.stock.token_ids),
        output_tokens=last.stock.num_tokens,
        identical=difference is None,
        difference=difference,
        steps=len(last.ours.step_s),
        stock_steps=len(last.stock.step_s),
        **counts,
        **(_speeds(timed, counts, times) if difference is None else UNTOLD),
    )


@dataclass(frozen=True, slots=True)
class Judged:
    """Where outputs part from stock's, in words: proven ties, and what is none."""

    ties: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def proven_row(name: str, batch: int, draft: int, pairs: Sequence[Pair], judged: Judged) -> Row:
    """As `make_row`, of outputs that may part at proven ties: behind those alone a speed is told."""
    is_told = not judged.differences
    shown = [replace(p, ours=replace(p.ours, token_ids=p.stock.token_ids)) for p in pairs] if is_told else pairs
    row = make_row(name, batch, draft, shown)
    told: dict[str, Any] = {"identical": is_told and not judged.ties, "is_proven": is_told}
    return row.but(**told, ties=judged.ties, differences=judged.differences, **({} if is_told else UNTOLD))


def ratios(ours: Sequence[Pair], than: Sequence[Pair]) -> list[float]:
    """Per timed round, how many times as long the first takes as the second."""
    timed = [[pair.ours.wall_s for pair in pairs if pair.is_timed] for pairs in (ours, than)]
    return [one / other for one, other in zip(*timed, strict=True)]


def ratio(ours: Sequence[Pair], than: Sequence[Pair]) -> float:
    """As `ratios`, the median."""
    return statistics.median(ratios(ours, than))


def speedup(pairs: Sequence[Pair]) -> float:
    """Stock's makespan by ours, median over rounds."""
    return statistics.median(pair.stock.wall_s / pair.ours.wall_s for pair in pairs if pair.is_timed)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper; of one value, that value twice."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def difference_of(pairs: Sequence[Pair]) -> str | None:
    """In words, where a run differs first; stock from itself before all: what it does not repeat is no measure."""
    itself = [pair.stock.itself for pair in pairs if pair.stock.itself is not None]
    found = itself or [d for pair in pairs if (d := first_difference(pair.stock, pair.ours)) is not None]
    if not found:
        return None
    more = f"; in {len(found)} runs" if len(found) > 1 else ""
    return ("stock against itself: " if itself else "") + found[0].as_text("then" if itself else "ours") + more


def _speeds(timed: Sequence[Pair], counts: dict[str, Any], times: StepTimes | None) -> dict[str, Any]:
    """The fields of SPEEDS."""
    last, ideal = timed[-1], None
    if times is not None and counts["tokens_per_step"] is not None:
        ideal = ideal_speedup(counts["tokens_per_step"], counts["nodes_per_step"] or 0.0, times)
    faster = speedup(timed)
    ours_s = statistics.median(pair.ours.wall_s for pair in timed)
    stock_s = statistics.median(pair.stock.wall_s for pair in timed)
    has_decoded = all(pair.ours.decode_s > 0 and pair.stock.decode_s > 0 for pair in timed)
    decode = [pair.stock.decode_s / pair.ours.decode_s for pair in timed] if has_decoded else []
    known = [(pair.ours, totals) for pair in timed if (totals := pair.ours.totals) is not None]
    # what a step of ours costs beyond the forward pass, and the drafting part of it
    overhead = [(run.wall_s * 1e3 - totals.forward_ms) / totals.steps for run, totals in known]
    draft = [totals.draft_ms / totals.steps for _, totals in known]
    return {
        "speedup": faster,
        "speedup_quartiles": quartiles([pair.stock.wall_s / pair.ours.wall_s for pair in timed]),
        "ideal": ideal,
        "efficiency": None if ideal is None else faster / ideal,
        "decode_speedup": statistics.median(decode) if decode else None,
        "makespan_s": ours_s,
        "stock_makespan_s": stock_s,
        "tokens_per_s": last.ours.num_tokens / ours_s,
        "stock_tokens_per_s": last.stock.num_tokens / stock_s,
        "overhead_ms_per_step": statistics.median(overhead) if overhead else None,
        "draft_ms_per_step": statistics.median(draft) if draft else None,
        "stock_step_ms": None if times is None else {str(n): ms for n, ms in sorted(times.items())},
        "rounds_s": [[pair.stock.wall_s, pair.ours.wall_s] for pair in timed],
    }


def _counts(run: Run) -> dict[str, Any]:
    """Per request and step. The step that computes the prompt is left out: it has no draft and yields one token."""
    totals = run.totals
    if totals is None:
        return {"tokens_per_step": 1.0, "nodes_per_step": 0.0, "verified_per_accepted": None}
    # None rather than a division by zero
    decode_steps = max(0, totals.request_steps - len(run.token_ids)) or None
    return {
        # what a request was given, not what the worker sampled: tokens after a stop are dropped
        "tokens_per_step": decode_steps and (run.num_tokens - len(run.token_ids)) / decode_steps,
        "nodes_per_step": decode_steps and totals.drafted / decode_steps,
        "verified_per_accepted": decode_steps and (totals.drafted / totals.accepted if totals.accepted else None),
    }
