"""Whether answers are stock's: asked again of a stock engine, once the server is gone. Ties are proven, not assumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..runner.engines import STOCK, Engines
from ..runner.runs import Parting, Run, partings
from ..runner.ties import Candidates, judged
from .client import Answer, sampling

_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the answers compare."""

    answers: int
    tokens: int
    # in words: differences within rounding, and others
    ties: tuple[str, ...]
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Single:
    """One answer of a request, as a request of its own."""

    name: str
    prompt: list[int]
    params: dict[str, Any]
    tokens: tuple[int, ...]


def compare(
    engines: Engines, answers: Sequence[Answer], max_tokens: int, dtype: str, report: Callable[[int, int], None]
) -> Verdict:
    """Ask stock for all of them; its engine was started with `JUDGE`.

    Args:
        report: told of answers done, and of all.
    """
    singles = [one for answer in answers for one in _singles(answer, max_tokens)]
    ties: list[str] = []
    differences: list[str] = []
    for begin in range(0, len(singles), _AT_ONCE):
        some = singles[begin : begin + _AT_ONCE]
        wanted = Run.from_child(
            engines[STOCK].ask("generate", prompts=[one.prompt for one in some], params=[one.params for one in some])
        )
        for parting in partings(wanted, replace(wanted, token_ids=tuple(one.tokens for one in some))):
            one = some[parting.request]
            is_tie, why = _judged(engines, one, parting, dtype)
            text = f"{one.name}, token {parting.position}: stock {parting.stock}, ours {parting.ours}, {why}"
            (ties if is_tie else differences).append(text)
        report(begin + len(some), len(singles))
    return Verdict(len(singles), sum(len(one.tokens) for one in singles), tuple(ties), tuple(differences))


def _singles(answer: Answer, max_tokens: int) -> list[_Single]:
    """vLLM makes requests of the answers that a request wants, with a seed each, counted up."""
    arrival, params = answer.arrival, sampling(answer.arrival, max_tokens)
    return [
        _Single(
            name=f"request {arrival.number} ({arrival.kind}), answer {i}",
            prompt=answer.prompt,
            params={**params, "seed": arrival.seed + i},
            tokens=tuple(tokens),
        )
        for i, tokens in enumerate(answer.tokens)
    ]


def _judged(engines: Engines, one: _Single, parting: Parting, dtype: str) -> tuple[bool, str]:
    """Whether it is a tie, and why."""
    if parting.stock is None or parting.ours is None:
        return False, "where one answer ended"
    prefix = list(one.tokens[: parting.position])
    found = engines[STOCK].ask(
        "look", prompt=one.prompt, params=one.params, at=len(prefix), candidates=[parting.stock, parting.ours]
    )
    if found["token_ids"][: len(prefix)] != prefix:
        return False, "and stock does not repeat itself"
    stock_logit, our_logit = found["logits"]
    candidates = Candidates(
        stock=parting.stock,
        ours=parting.ours,
        stock_logit=stock_logit,
        our_logit=our_logit,
        num_prompt=len(one.prompt),
        num_prefix=len(prefix),
        width=found["width"],
    )
    return judged(candidates, one.params["seed"], one.params["temperature"], dtype)
