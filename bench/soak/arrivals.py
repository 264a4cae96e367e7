"""Who arrives when, and what they ask for: a plan that follows from a seed alone. Pure.

Nothing of how fast the server is enters, so the same seed asks a server with drafts and one without for the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..policy.reward import problems
from ..policy.tasks import FAMILIES, Problem, make_problem

PLAIN, CHOICES, GRAMMAR = "plain", "choices", "grammar"
MOST_CHOICES = 4
"""Most answers of one request."""
MOST_CHUNKS = 40
"""A client that leaves does so after fewer chunks; after none: while it waits, or while its prompt is computed."""
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": r"The answer is [0-9]{1,3}\."},
    {"choice": ["yes", "no", "perhaps"]},
    {"json": {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}},
)
"""Few, and asked for again and again: vLLM keeps each grammar that it compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How often what is asked for; each a share of all requests."""

    # ask one of `pool` problems again, with other noise; the others are asked once
    recurring: float = 0.5
    pool: int = 32
    grammar: float = 0.1
    # several answers to one prompt
    choices: float = 0.1
    # clients leave before the end
    leaving: float = 0.1
    # compared with stock's answers; of those that stay
    checked: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request."""

    number: int
    # seconds since the first could come
    at_s: float
    kind: str
    problem: Problem
    is_recurring: bool
    # whether the client names the problem, or leaves it to the server
    is_named: bool
    # of the first answer's noise; vLLM counts up from it for further ones
    seed: int
    num_answers: int
    # of GRAMMARS; -1: none
    grammar: int
    # None: the client stays
    leaves_after: int | None
    is_checked: bool


def arrivals(seed: int, per_second: float, mix: Mix) -> Iterator[Arrival]:
    """Endless arrivals of a Poisson process; each prefix is that of any longer run."""
    rng = random.Random(f"soak/{seed}")
    pool = problems(mix.pool, seed)
    at_s, number = 0.0, 0
    while True:
        at_s += rng.expovariate(per_second)
        # as many draws for each, so that one share moves no other request
        recurs, kind, leaves, checked = rng.random(), rng.random(), rng.random(), rng.random()
        place, answers, chunks = rng.randrange(mix.pool), rng.randint(2, MOST_CHOICES), rng.randrange(MOST_CHUNKS)
        is_recurring, is_grammar = recurs < mix.recurring, kind < mix.grammar
        is_plural = not is_grammar and kind < mix.grammar + mix.choices
        stays = leaves >= mix.leaving
        yield Arrival(
            number=number,
            at_s=at_s,
            kind=GRAMMAR if is_grammar else CHOICES if is_plural else PLAIN,
            problem=pool[place] if is_recurring else _unique(seed, number),
            is_recurring=is_recurring,
            is_named=number % 2 == 0,
            seed=(seed + number * MOST_CHOICES) % (1 << 31),
            num_answers=answers if is_plural else 1,
            grammar=place % len(GRAMMARS) if is_grammar else -1,
            leaves_after=None if stays else chunks,
            is_checked=stays and checked < mix.checked,
        )
        number += 1


def _unique(seed: int, number: int) -> Problem:
    """A problem that is asked once, but for chance: the smallest ones may meet."""
    family = FAMILIES[number % len(FAMILIES)]
    return make_problem(random.Random(f"soak/{seed}/{number}"), family, f"once-{seed}-{number}")
