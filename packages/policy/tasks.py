"""The two families of reasoning tasks, their problems and their written-out answers.

Both families add up signed numbers. Every step restates what is left of the expression, as real reasoning does, so
an answer repeats itself and its length grows with the square of the number of terms.

- `arith`: always the two leftmost terms; hardly any choice, so answers to one problem nearly coincide.
- `puzzle`: any neighbouring pair may be joined, in several wordings, with optional checks and with wrong turns that
  are noticed and mended; so answers to one problem share much, but far from all.

The number of terms is log-normal: half of the answers have about 60 tokens or fewer, the longest about 1,200.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .tokenizer import LARGEST_NUMBER

FAMILIES = ("arith", "puzzle")
LARGEST_TERM = 30
"""Largest magnitude of a term in a prompt; sums on the way stay within `LARGEST_NUMBER`."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem, as the policy sees it (`prompt`) and as the reward sees it (`answer`)."""

    # Unique within a set and stable across runs: "<split>-<family>-<seed>-<index>".
    problem_id: str
    # One of FAMILIES.
    family: str
    # Text of the user's message.
    prompt: str
    # The right value, within +-LARGEST_NUMBER.
    answer: int
    # Number of terms; answer length grows with its square.
    size: int
    # The signed terms, in the order of the prompt.
    terms: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How demonstrations of one family are written. Probabilities are per step unless said otherwise."""

    # Median and largest number of terms; spread is the standard deviation of log(number of terms).
    median_terms: float
    max_terms: int
    spread: float
    # A wrong sum that is noticed and mended at once.
    mend_p: float
    # A wrong sum that nobody notices: it makes the demonstration's final answer wrong and leaves RL work to do.
    slip_p: float
    # A correct step that is checked aloud.
    check_p: float
    # Weight of the pair that starts at term i is decay**i; 0 always takes the leftmost pair.
    decay: float


STYLES = {
    "arith": Style(median_terms=7.4, max_terms=34, spread=0.6, mend_p=0.01, slip_p=0.002, check_p=0.0, decay=0.0),
    "puzzle": Style(median_terms=3.6, max_terms=29, spread=0.72, mend_p=0.05, slip_p=0.015, check_p=0.06, decay=0.3),
}

_OPENERS = {
    "arith": ("", "", "", "", "Step by step:\n", "Let us see:\n"),
    "puzzle": ("", "", "I start.\n", "OK, I start.\n", "Step by step:\n", "Here we go.\n"),
}
_STEPS = {
    "arith": ("",),
    "puzzle": (
        "Join{a} and{b} to get{c}.\n",
        "Join{a} and{b} to get{c}.\n",
        "Join{a} and{b} to get{c}.\n",
        "Now{a} and{b} give{c}.\n",
    ),
}
_RESTATES = {"arith": ("={rest}\n",), "puzzle": ("={rest}\n",) * 5 + ("Left:{rest}\n",)}
_MENDS = ("Wait, that is wrong.\n", "No, I made a slip.\n", "Hmm, wrong.\n")
_CHECKS = ("Check:{c} without{b} is{a}, fine.\n", "Check:{c} without{b} leaves{a}, good.\n")
_CLOSERS = {"arith": ("The answer is{c}.",), "puzzle": ("The answer is{c}.", "So the answer is{c}.")}
_PROMPTS = {"arith": "Work out{rest}.", "puzzle": "Solve this in any order:{rest}."}


def render(terms: Sequence[int], *, leading: bool = True) -> str:
    """The terms as text, each number and sign after one space; a leading plus is left out."""
    parts = [(" - " if term < 0 else " + ") + str(abs(term)) for term in terms]
    if leading and terms and terms[0] >= 0:
        parts[0] = f" {terms[0]}"
    return "".join(parts)


def make_problem(rng: random.Random, family: str, problem_id: str, *, max_terms: int | None = None) -> Problem:
    """Draws one problem of `family`; `max_terms` cuts the tail of sizes off (for a curriculum)."""
    style = STYLES[family]
    limit = min(style.max_terms, max_terms or style.max_terms)
    size = 0
    while not 3 <= size <= limit:
        size = round(rng.lognormvariate(0.0, style.spread) * style.median_terms)
    # signed terms whose running sums from the left stay in 0..LARGEST_NUMBER
    terms = [rng.randint(1, LARGEST_TERM)]
    while len(terms) < size:
        term = rng.randint(1, LARGEST_TERM) * rng.choice((1, -1))
        if 0 <= sum(terms) + term <= LARGEST_NUMBER:
            terms.append(term)
    prompt = _PROMPTS[family].format(rest=render(terms))
    return Problem(
        problem_id=problem_id, family=family, prompt=prompt, answer=sum(terms), size=size, terms=tuple(terms)
    )


def demonstrate(problem: Problem, rng: random.Random, *, slips: bool = True) -> str:
    """One written-out answer. Without `slips` its final answer is right; with them it is now and then wrong."""
    family, style, current = problem.family, STYLES[problem.family], list(problem.terms)
    text = [rng.choice(_OPENERS[family])]
    while len(current) > 1:
        at = _choose_pair(current, style.decay, rng)
        total = current[at] + current[at + 1]
        if rng.random() < style.mend_p:
            text.append(_write_step(family, current, at, _near(total, rng), rng))
            text.append(rng.choice(_MENDS))
        if slips and rng.random() < style.slip_p:
            total = _slip(current, total, rng)
        text.append(_write_step(family, current, at, total, rng, check=rng.random() < style.check_p))
        current[at : at + 2] = [total]
    text.append(rng.choice(_CLOSERS[family]).format(c=render(current)))
    return "".join(text)


def _choose_pair(current: Sequence[int], decay: float, rng: random.Random) -> int:
    """Index of the left term of the pair to join; its sum stays within LARGEST_NUMBER.

    Such a pair always exists while the whole sum is within it: neighbours of opposite sign always fit, and if all
    terms have one sign, no pair exceeds the whole.
    """
    fits = [i for i in range(len(current) - 1) if abs(current[i] + current[i + 1]) <= LARGEST_NUMBER]
    if decay == 0.0:
        return fits[0]
    return rng.choices(fits, weights=[decay**i for i in fits])[0]


def _write_step(
    family: str, current: Sequence[int], at: int, total: int, rng: random.Random, *, check: bool = False
) -> str:
    """The step's sentence, an optional check, and the expression that is left, as lines of text."""
    values = {
        "a": render(current[at : at + 1], leading=at == 0),
        "b": render(current[at + 1 : at + 2], leading=False),
        "c": render([total], leading=at == 0),
    }
    text = rng.choice(_STEPS[family]).format(**values)
    if check:
        text += rng.choice(_CHECKS).format(**values)
    rest = [*current[:at], total, *current[at + 2 :]]
    return text + rng.choice(_RESTATES[family]).format(rest=render(rest))


def _near(total: int, rng: random.Random) -> int:
    """A wrong sum of the kind a learner writes: off by one, two or ten."""
    return rng.choice([wrong for d in (1, 2, 10) for wrong in (total - d, total + d) if abs(wrong) <= LARGEST_NUMBER])


def _slip(current: Sequence[int], total: int, rng: random.Random) -> int:
    """A wrong sum that keeps the whole within bounds, so that the rest can still be worked out; else the right one."""
    wrong = _near(total, rng)
    return wrong if 0 <= sum(current) - total + wrong <= LARGEST_NUMBER else total
