"""The specification of `decoupled.rates`: drafters and verifiers, token by token, in time.

Nothing here knows a formula: a drafter drafts a token every so many milliseconds, and a verifier does one step after
the other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from vllm_specrollout.cluster.rates import AffineTime

_ALMOST = 1e-7  # milliseconds


def coupled(
    draft: AffineTime, verify: AffineTime, batch: int, w: int, p: float, *, rounds: int, seed: int, exits=(0.0, 0)
) -> float:
    """Tokens per millisecond of one request; exits: that one is hit, and alternatives at each place."""
    rng = random.Random(seed)
    tokens, now = 0, 0.0
    for _ in range(rounds):
        for _ in range(w):
            now += draft.ms(batch)
        now += verify.ms(batch, w * (1 + exits[1]))
        for _ in range(w):
            tokens += 1
            if rng.random() >= p:
                tokens += rng.random() < exits[0]
                break
        else:
            tokens += 1
    return tokens / now


@dataclass
class Request:
    """What is drafted for it, and where it stands since its last miss; `at` is when its present token was begun."""

    w: int
    p: float
    known: int = 0
    drafted: int = 0
    at: float = 0.0


def never_waiting(
    draft: AffineTime, verify: AffineTime, requests: list[Request], *, steps: int, seed: int, exits: float = 0.0
) -> float:
    """Tokens per millisecond of all requests together."""
    rng = random.Random(seed)
    tokens, now, token_ms = 0, 0.0, draft.ms(len(requests))
    for _ in range(steps):
        sizes = [arrived(request) for request in requests]
        begin = now
        now += verify.ms(len(requests)) + verify.per_row_ms * sum(sizes)
        for request, size in zip(requests, sizes, strict=True):
            advance(request, token_ms, now)
            for _ in range(size + 1):
                tokens += 1
                request.known += 1
                if rng.random() >= request.p:
                    restart(request, now)
                    if rng.random() < exits:
                        # the token was foreseen, and its continuation drafted while the step ran
                        request.known, request.at = 1, begin
                        advance(request, token_ms, now)
                    break
    return tokens / now


def arrived(request: Request) -> int:
    """What the next step verifies: the rest of the present window, if it was sent whole; nothing right after a miss."""
    end = (request.known // request.w + 1) * request.w
    return end - request.known if request.known and request.drafted >= end else 0


def advance(request: Request, token_ms: float, until: float) -> None:
    """Draft until then, but no further than one window ahead of what was answered."""
    while True:
        most = (request.known // request.w + 2) * request.w
        if request.drafted >= most:
            request.at = until
            return
        if request.at + token_ms > until + _ALMOST:
            return
        request.at += token_ms
        request.drafted += 1


def restart(request: Request, now: float) -> None:
    request.known, request.drafted, request.at = 0, 0, now
