"""Running requests and comparing what came out: tokens, texts, finish reasons, logprobs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm import LLM

from bench.runner.ties import tolerance
from tests.e2e.identity.cases import Case
from tests.e2e.identity.ties import Judge, judged
from vllm_specrollout.worker.rows import ask_host


@dataclass
class Report:
    """Totals of a comparison."""

    requests: int = 0
    tokens: int = 0
    ties: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    worst_logprob: float = 0.0

    def add(self, other: Report) -> None:
        self.requests += other.requests
        self.tokens += other.tokens
        self.ties += other.ties
        self.failures += other.failures
        self.worst_logprob = max(self.worst_logprob, other.worst_logprob)

    def __str__(self) -> str:
        rate = f"{len(self.ties)} ties in {self.tokens} tokens"
        return (
            f"{self.requests} requests, {rate}, {len(self.failures)} failures, logprobs within {self.worst_logprob:.1e}"
        )


def run(llm: LLM, cases: Sequence[Case], **spec_rollout: Any) -> list[Any]:
    """All requests at once; the batch is as large as the engine allows and shrinks as they finish."""
    return llm.generate(
        [case.asked for case in cases], [case.sampling(**spec_rollout) for case in cases], use_tqdm=False
    )


def compare(
    cases: Sequence[Case], wanted: Sequence[Any], got: Sequence[Any], dtype: str, judge: Judge | None = None
) -> Report:
    """Compare outputs; with a judge a difference may be proven to be a tie, without one each is a failure."""
    report = Report()
    for case, theirs, ours in zip(cases, wanted, got, strict=True):
        report.requests += 1
        for a, b in zip(theirs.outputs, ours.outputs, strict=True):
            report.tokens += len(a.token_ids)
            _compare_one(case, a, b, dtype, judge, report)
        if theirs.prompt_logprobs is not None:
            _compare_logprobs(case, theirs.prompt_logprobs[1:], ours.prompt_logprobs[1:], dtype, report)
    return report


def _compare_one(case: Case, a: Any, b: Any, dtype: str, judge: Judge | None, report: Report) -> None:
    x, y = list(a.token_ids), list(b.token_ids)
    if x == y:
        for name in ("text", "finish_reason", "stop_reason"):
            if getattr(a, name) != getattr(b, name):
                report.failures.append(
                    f"{case.name} #{case.problem_id}: {name} {getattr(a, name)!r} != {getattr(b, name)!r}"
                )
        if a.logprobs is not None:
            _compare_logprobs(case, a.logprobs, b.logprobs, dtype, report)
        return
    at = next((i for i, (t, u) in enumerate(zip(x, y, strict=False)) if t != u), min(len(x), len(y)))
    where = f"{case.name} #{case.problem_id} token {at}: {x[at : at + 4]} != {y[at : at + 4]}"
    if judge is None or at >= min(len(x), len(y)):
        report.failures.append(where)
        return
    is_tie, why = judged(judge, case, x[:at], x[at], y[at], a.index, dtype)
    (report.ties if is_tie else report.failures).append(f"{where}, {why}")


def are_level(x: Any, y: Any, strays: Sequence[Sequence[float]], limit: float) -> bool:
    """Whether what only one side lists stands in for what only the other does, at equal logprobs.

    Of tokens level with the last of the top k, which are listed depends in stock vLLM on the batch: it takes the top of
    the largest k asked for in it. If the token itself is among them, it may stand in the top k or be listed besides.
    """
    if len(x) == len(y):
        return np.allclose(*strays, rtol=0.0, atol=limit)
    if abs(len(x) - len(y)) != 1:
        return False
    last = min(value.logprob for value in min(x, y, key=len).values())
    return np.allclose([*strays[0], *strays[1]], last, rtol=0.0, atol=limit)


@functools.cache
def _rows_are_alike() -> bool:
    return ask_host("bfloat16").attention


def _compare_logprobs(case: Case, a: Any, b: Any, dtype: str, report: Report) -> None:
    if len(a) != len(b):
        report.failures.append(f"{case.name} #{case.problem_id}: {len(a)} != {len(b)} positions with logprobs")
        return
    # in bfloat16 on a host of unlike rows: what logits may be apart at a magnitude of 16
    limit = tolerance(dtype, [] if _rows_are_alike() else [16.0])
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        common = set(x) & set(y)
        if not common:
            report.failures.append(f"{case.name} #{case.problem_id} token {i}: no common logprob tokens")
            continue
        # equal values first: -inf and -inf are level, but their difference is not a number
        worst = max((abs(x[t].logprob - y[t].logprob) for t in common if x[t].logprob != y[t].logprob), default=0.0)
        report.worst_logprob = max(report.worst_logprob, worst)
        strays = [sorted(v.logprob for t, v in side.items() if t not in common) for side in (x, y)]
        if worst > limit or not are_level(x, y, strays, limit):
            report.failures.append(
                f"{case.name} #{case.problem_id} token {i}: logprobs {worst:.1e} apart, strays {strays}"
            )
