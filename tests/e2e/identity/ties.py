"""Proving floating-point ties of the identity suite's cases; what a tie is stands in `bench/runner/ties.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from bench.runner import ties
from bench.runner.ties import JUDGE, TieCandidates
from tests.e2e.identity.cases import Case

__all__ = ["JUDGE", "Judge", "gap", "judged"]


@dataclass(frozen=True)
class Judge:
    """A stock engine with the arguments `JUDGE`, which is asked about one request."""

    # runs it alone
    alone: Callable[[Case], Any]
    # runs it among all others of its round, as its answer came to be: rows may round by how many there are
    among_all: Callable[[Case], Any] | None = None

    def answers(self, case: Case, answer: int) -> Iterator[Any]:
        """One answer of the request with the logits of all positions, in each way that it can be run."""
        own = {key: case.params[key] for key in case.params.keys() - {"n", "prompt_logprobs", "logprob_token_ids"}}
        if "seed" in own:
            own["seed"] += answer
        yield self.alone(replace(case, params={**own, "logprobs": -1})).outputs[0]
        if self.among_all is not None:
            yield self.among_all(case).outputs[answer]


def judged(
    judge: Judge, case: Case, prefix: list[int], stock_token: int, our_token: int, answer: int, dtype: str
) -> tuple[bool, str]:
    """Whether the two candidates after `prefix` are level, and how far apart they are.

    Args:
        judge: stock.
        case: the request; of several answers, `answer` is the one that differs.
        prefix: the tokens before.
    """
    asked = _candidates(judge, case, prefix, stock_token, our_token, answer)
    if asked is None:
        return False, "and stock does not repeat itself"
    candidates, seed, (lowest, highest) = asked
    temperature = case.params.get("temperature", 1.0)
    is_tie, why = ties.judged(candidates, seed, temperature, dtype)
    if is_tie:
        return True, why
    # where a mask cuts by the logits themselves (top-k, top-p, min-p), either may stand at its edge: there stock takes
    # ours as soon as one of them is raised or lowered by what rounding may add: to what stands at the edge, and to the
    # likeliest token, which the mass that top-p cuts by and what min-p compares with hang on
    by = ties.tolerance(dtype, [logit * (temperature or 1.0) for logit in (lowest, highest)])
    for token, bias in ((our_token, by), (stock_token, -by)):
        moved = {**case.params.get("logit_bias", {})}
        moved[token] = moved.get(token, 0.0) + bias
        asked_again = replace(case, params={**case.params, "logit_bias": moved})
        for output in judge.answers(asked_again, answer):
            if list(output.token_ids[: len(prefix) + 1]) == [*prefix, our_token]:
                return True, f"at a mask's edge: stock takes ours with {bias:+.1e} on {token}"
    return False, why


def gap(judge: Judge, case: Case, prefix: list[int], stock_token: int, our_token: int) -> float:
    """How far apart the two candidates are after `prefix`; infinity if it cannot be told."""
    asked = _candidates(judge, case, prefix, stock_token, our_token, 0)
    return float("inf") if asked is None else ties.gap(*asked[:2], case.params.get("temperature", 1.0))


def _candidates(
    judge: Judge, case: Case, prefix: list[int], stock_token: int, our_token: int, answer: int
) -> tuple[TieCandidates, int | None, tuple[float, float]] | None:
    """Both, as stock sees them, the seed of their noise, and the least and the highest logit that no mask cut.

    None where stock does not repeat itself.
    """
    seed = case.params.get("seed")
    for output in judge.answers(case, answer):
        if list(output.token_ids[: len(prefix)]) != prefix or len(output.logprobs) == len(prefix):
            continue
        row = output.logprobs[len(prefix)]
        candidates = TieCandidates(
            stock=stock_token,
            ours=our_token,
            stock_logit=row[stock_token].logprob,
            our_logit=row[our_token].logprob,
            num_prompt=len(case.prompt),
            num_prefix=len(prefix),
            width=len(row),
        )
        kept = [value.logprob for value in row.values() if math.isfinite(value.logprob)]
        return candidates, None if seed is None else seed + answer, (min(kept), max(kept))
    return None
