"""Load patterns, and what their rows come to. Pure.

Arrivals depend on how many requests have finished, never on the clock, so that every preset meets the same load.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vllm_specrollout.policies.presets import names

from ..common import flags
from ..common.models import DTYPES
from ..common.rows import Row
from ..common.tuned import AUTO, Budget

PROMPT_LEN = 64
PATTERNS = ("drain", "fill", "bursts", "bad-drafter", "new-weights")
WITHIN = 0.95
"""`auto` may take 5 % longer than the best preset."""
TAIL_GAIN = 1.15
"""What expected lengths are to be worth in a long-tail rollout, in drafts and in the queue's order together."""
MOST_SWITCHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One load."""

    name: str
    # per request
    lengths: tuple[int, ...]
    # per request, ascending: it arrives once so many have finished
    arrives_after: tuple[int, ...]
    # output position of each request after which the drafter is bad; None: never
    turns_bad_at: int | None = None
    # the weights are loaded anew once so many have finished; None: never
    reload_after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of one `specrollout bench ramp`."""

    patterns: tuple[str, ...] = PATTERNS
    budgets: tuple[str, ...] = names()
    requests: int = 64
    tokens: int = 96
    accuracy: float = 0.8
    max_draft_tokens: int = 7
    rounds: int = 3
    dtype: str = "bfloat16"
    seed: int = 0
    is_tail: bool = False
    # of a tail: requests at once
    places: int = 8

    def __post_init__(self) -> None:
        flags.in_range(self.requests, "--requests", 8, 256)
        flags.in_range(self.tokens, "--tokens", 8, 1 << 14)
        flags.in_range(self.places, "--batch", 1, 256)
        flags.in_range(self.max_draft_tokens, "--max-draft-tokens", 1, 64)
        flags.in_range(self.rounds, "--rounds", 1, 1000)
        flags.in_range(self.seed, "--seed", 0, 1 << 20)
        flags.choice(self.dtype, "--dtype", DTYPES)

    def arms(self) -> list[Budget]:
        """`auto` first."""
        if self.is_tail:
            unweighted = Budget(name="auto", length_weight=False)
            return [AUTO, unweighted, replace(unweighted, longest_first=False)]
        return [AUTO, *(Budget(name=name) for name in self.budgets if name != AUTO.name)]

    def spec_rollout(self, drafters: Sequence[str]) -> dict[str, Any]:
        most = self.max_draft_tokens
        return {"drafters": list(drafters), "max_draft_tokens": most, "max_depth": most}

    def engine_arguments(self, model: Path, max_num_seqs: int) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`, the same for stock and ours.

        Args:
            max_num_seqs: requests at once.
        """
        return {
            "model": str(model),
            "dtype": self.dtype,
            "seed": 0,
            "enforce_eager": True,
            "max_num_seqs": max_num_seqs,
            "max_model_len": self.max_model_len(),
            "max_num_batched_tokens": max(2048, max_num_seqs * 4 * PROMPT_LEN),
        }

    def max_model_len(self) -> int:
        return (4 if self.is_tail else 1) * PROMPT_LEN + self.tokens + 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RampRow(Row):
    """A row of one pattern under one budget; `batch` is the most requests at once."""

    pattern: str
    seed: int
    is_comparable: bool
    # of the last round, as `spec_rollout_switches` counts them
    switches: int
    mind_changes: int
    steps_on: int
    steps_off: int
    # 75th percentile of the answers' lengths / the longest
    length_ratio: float
    # the fastest preset's makespan / this one's, median over rounds; on the row of `auto` only
    auto_to_best: float | None
    best: str | None


def pattern(name: str, requests: int, tokens: int) -> Pattern:
    """The pattern of this name for about so many requests, the longest of about so many tokens."""
    if name == "drain":
        return Pattern(name=name, lengths=_spread(requests, tokens), arrives_after=(0,) * requests)
    if name == "fill":
        return _fill(requests, tokens)
    if name == "bursts":
        return _bursts(requests, tokens)
    few = max(requests // 8, 3)
    if name == "bad-drafter":
        return Pattern(name=name, lengths=(tokens,) * few, arrives_after=(0,) * few, turns_bad_at=tokens // 2)
    # one short answer, at whose end the weights change
    return Pattern(name=name, lengths=(tokens // 2, *(tokens,) * (few - 1)), arrives_after=(0,) * few, reload_after=1)


def _spread(count: int, tokens: int) -> tuple[int, ...]:
    """Lengths with a long tail: most are short, a few close to `tokens`."""
    return tuple(max(4, round(tokens * ((i + 1) / count) ** 3)) for i in range(count))


def _fill(requests: int, tokens: int) -> Pattern:
    """1, then 4, 16, ... more: each wave comes when the first answer of the last one ends, while the others go on."""
    lengths, arrives, wave = [max(4, tokens // 4)], [0], 4
    finished = 1
    while len(lengths) < requests:
        size = min(wave, requests - len(lengths))
        lengths += [max(4, tokens // 4), *(tokens,) * (size - 1)]
        arrives += [finished] * size
        finished, wave = finished + 1, wave * 4
    return Pattern(name="fill", lengths=tuple(lengths), arrives_after=tuple(arrives))


def _bursts(requests: int, tokens: int) -> Pattern:
    """Three bursts of short answers beside one long one; each comes when the last one is over."""
    size = max((requests - 1) // 3, 1)
    lengths, arrives = [tokens], [0]
    for burst in range(3):
        lengths += [max(4, tokens // 4)] * size
        arrives += [burst * size] * size
    return Pattern(name="bursts", lengths=tuple(lengths), arrives_after=tuple(arrives))


def tail(sizes: Sequence[int], seed: int, num_short: int, num_long: int) -> list[int]:
    """Indices of problems for a long tail: the shortest and the longest ones by `sizes`, mixed."""
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], i))
    chosen = [*order[:num_short], *order[len(order) - num_long :]]
    random.Random(seed).shuffle(chosen)
    return chosen


def tail_ratio(lengths: Sequence[int]) -> float:
    """The 75th percentile of the lengths by the longest; below 0.2 is a long tail."""
    ordered = sorted(lengths)
    return ordered[(len(ordered) - 1) * 3 // 4] / ordered[-1]


def summary(rows: Sequence[RampRow]) -> dict[str, Any]:
    """Per pattern: `auto` by the best preset, and how often it switched."""
    found = {}
    for row in rows:
        if row.name == AUTO.title:
            least = TAIL_GAIN if row.pattern == "tail" else WITHIN
            found[row.pattern] = {
                "auto_to_best": row.auto_to_best,
                "best": row.best,
                "switches": row.switches,
                "is_met": None if row.auto_to_best is None else row.auto_to_best >= least,
                "is_steady": row.switches <= MOST_SWITCHES,
            }
    return found
