"""Whether answers are stock's: asked again of a stock engine, once the server is gone. Ties are proven, not assumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..runner.engines import STOCK, Engines
from ..runner.runs import Run, partings
from ..runner.ties import asked
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
            is_tie, why = asked(engines[STOCK], one.prompt, one.params, one.tokens, parting, dtype)
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
