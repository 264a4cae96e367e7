"""Proving floating-point ties of the identity suite's cases; what a tie is stands in `bench/runner/ties.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.runner import ties
from bench.runner.ties import TOLERANCE, Candidates
from tests.e2e.identity.cases import Case

__all__ = ["JUDGE", "TOLERANCE", "Judge", "gap"]

Judge = Callable[[Case], Any]
"""Runs one request in a stock engine whose logprobs are of every token, and of the logits that are sampled from."""

JUDGE = {"max_logprobs": -1, "logprobs_mode": "processed_logprobs"}
"""Arguments of such an engine."""


def gap(judge: Judge, case: Case, prefix: list[int], stock_token: int, our_token: int, answer: int = 0) -> float:
    """How far apart the two candidates are after `prefix`; infinity if it cannot be told.

    Args:
        judge: stock.
        case: the request; of several answers, `answer` is the one that differs.
        prefix: the tokens before.
    """
    own = {key: value for key, value in case.params.items() if key not in ("n", "prompt_logprobs", "logprob_token_ids")}
    if "seed" in own:
        own["seed"] += answer
    output = judge(replace(case, params={**own, "logprobs": -1})).outputs[0]
    if list(output.token_ids[: len(prefix)]) != prefix:
        return float("inf")
    row = output.logprobs[len(prefix)]
    candidates = Candidates(
        stock=stock_token,
        ours=our_token,
        stock_logprob=row[stock_token].logprob,
        our_logprob=row[our_token].logprob,
        num_prompt=len(case.prompt),
        num_prefix=len(prefix),
        width=len(row),
    )
    return ties.gap(candidates, own.get("seed"), own.get("temperature", 1.0))
