"""What one run of an engine yields, and whether two runs yield the same. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any


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
    # rows of the forward pass -> (steps, milliseconds), decode steps only
    by_rows: Mapping[int, tuple[int, float]]
    # waiting for sampled tokens
    wait_ms: float = 0.0
    # steps that accepted another branch than the first
    branches_committed: int = 0

    @classmethod
    def from_worker(cls, stats: Mapping[str, Any]) -> WorkerTotals:
        """Pick what is known from the worker's answer, which may grow."""
        rows = {int(rows): (int(steps), float(ms)) for rows, (steps, ms) in stats["by_rows"].items()}
        return cls(**{name: stats[name] for name in cls.__dataclass_fields__ if name in stats} | {"by_rows": rows})


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
        stats = reply.get("stats")
        return cls(
            token_ids=tuple(map(tuple, reply["token_ids"])),
            finish_s=tuple(reply["finish_s"]),
            step_s=tuple(reply["step_s"]),
            totals=None if stats is None else WorkerTotals.from_worker(stats),
        )

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
