"""Why the slowest requests took so long: what was decided for them, stretch by stretch. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_specrollout.observe.timeline import Segment, summarise

from ..policy.tasks import Problem
from ..runner.report import Columns, Table
from ..runner.runs import Run

_MOST_LINES = 12
_MOST_REASONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One request of a rollout, and what was decided for it."""

    problem_id: str
    # of the problem's answers, from 1
    answer: int
    num_tokens: int
    # seconds since the run's start
    finish_s: float
    # in order; times since the run's start. Empty: the budget was never asked
    stretches: tuple[Segment, ...]


def slowest(
    run: Run, told: Sequence[Mapping[str, Any]], problems: Sequence[Problem], samples: int, count: int
) -> list[Explained]:
    """The requests that ended last, the very last one first.

    Args:
        run: of our engine; all samples of the first problem, then of the second, ...
        told: the worker's `spec_rollout_explained` after that run; names are the requests' numbers.
    """
    by_name = {entry["name"]: [Segment(**stretch) for stretch in entry["stretches"]] for entry in told}
    last = sorted(range(len(run.finish_s)), key=lambda i: -run.finish_s[i])[:count]
    found = []
    for i in last:
        stretches = by_name.get(str(i), [])
        for stretch in stretches:
            stretch.end = min(stretch.end, len(run.token_ids[i]))
            # the worker's clock starts with the end of the first step
            stretch.begin_s += run.step_s[0]
            stretch.end_s += run.step_s[0]
        found.append(
            Explained(
                problem_id=problems[i // samples].problem_id,
                answer=i % samples + 1,
                num_tokens=len(run.token_ids[i]),
                finish_s=run.finish_s[i],
                stretches=tuple(summarise(stretches, _MOST_LINES)),
            )
        )
    return found


def explained_text(explained: Sequence[Explained]) -> Iterator[Table | str]:
    """A table per request, a line per stretch."""
    for number, one in enumerate(explained, 1):
        steps = sum(stretch.steps for stretch in one.stretches)
        begin = f" (begun at {one.stretches[0].begin_s:.2f} s)" if one.stretches else ""
        yield (
            f"\nslowest {number}: {one.problem_id}, answer {one.answer}: {one.num_tokens} tokens in {steps} steps,"
            f" done at {one.finish_s:.2f} s{begin}"
        )
        if one.stretches:
            yield Table(one.stretches, _COLUMNS)
        else:
            yield "the budget was never asked for it: `specrollout doctor --model` says what may be drafted"


def reasons_text(reasons: Mapping[str, int]) -> str:
    """`pays`, or `pays 61 %, nothing proposed 39 %`: most frequent first, at most three by name."""
    if len(reasons) == 1:
        return next(iter(reasons))
    steps = sum(reasons.values())
    named = Counter(reasons).most_common(_MOST_REASONS)
    other = steps - sum(count for _, count in named)
    named += [("other", other)] if other else []
    return ", ".join(f"{reason} {100 * count / steps:.0f} %" for reason, count in named)


_COLUMNS: Columns = {
    "tokens": lambda one: f"{one.first}-{one.end}",
    "from s": lambda one: f"{one.begin_s:.2f}",
    "running": lambda one: f"{one.batch / one.steps:.0f}",
    "why": lambda one: reasons_text(one.reasons),
    "steps": "steps",
    "nodes/ step": lambda one: f"{one.nodes / one.steps:.1f}",
    "accepted/ step": lambda one: f"{one.accepted / one.steps:.1f}",
    "expected/ step": lambda one: f"{one.expected / one.steps:.1f}" if one.expected > 0.0 else None,
    "ms/ step": lambda one: f"{(one.end_s - one.begin_s) * 1e3 / one.steps:.1f}",
    "expected (plain) ms": lambda one: (
        f"{one.expected_ms / one.foretold:.1f} ({one.plain_ms / one.foretold:.1f})" if one.foretold else None
    ),
}
