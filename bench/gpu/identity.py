"""Whether our outputs are stock's: token by token, and where they part, whether that is a proven tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..common.engine_process import EngineProcess
from ..common.runs import Run

TOLERANCE = 0.05
"""Most by which two level candidates' logits may be apart in bf16; the same as the identity tests allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one run compares with stock's."""

    # ours, with every proven tie's output replaced by stock's: what is left differs for no good reason
    ours: Run
    ties: int
    # tokens up to the first difference, over all requests: what was compared
    compared: int


def compare(
    stock: EngineProcess,
    prompts: Sequence[list[int]],
    params: Sequence[dict[str, Any]],
    wanted: Run,
    found: Run,
) -> Verdict:
    """Prove each request's first difference a tie, or leave it a difference.

    After a tie the two go on from different tokens, so nothing behind it is compared. The makespans still are: every
    request runs to its full length in both.
    """
    outputs, ties, compared = list(found.token_ids), 0, 0
    for i, (one, other) in enumerate(zip(wanted.token_ids, found.token_ids, strict=True)):
        at = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        compared += len(one) if at is None else at
        if at is None or len(one) != len(other):
            continue
        if is_tie(stock, [*prompts[i], *one[:at]], params[i], one[at], other[at]):
            outputs[i] = one
            ties += 1
    return Verdict(ours=replace(found, token_ids=tuple(outputs)), ties=ties, compared=compared)


def is_tie(stock: EngineProcess, prefix: list[int], params: dict[str, Any], stock_token: int, our_token: int) -> bool:
    """Whether stock itself, on the common prefix, takes either token when its logit is raised by the tolerance.

    The noise is keyed on seed and position, and the prefix puts the token at the same position; so with no bias this is
    the very choice that was made, and the engine itself is the judge of both candidates.
    """
    base = {**{k: v for k, v in params.items() if k != "extra_args"}, "max_tokens": 1}
    for token in (stock_token, our_token):
        biased = {**base, "logit_bias": {token: TOLERANCE}}
        answer = Run.from_child(stock.ask("generate", prompts=[prefix], params=[biased], is_warm=True))
        if answer.token_ids[0][0] != token:
            return False
    return True
