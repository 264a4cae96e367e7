"""Whether our outputs are stock's: token by token, and where they part, whether that is a proven tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..runner.engine_process import EngineProcess
from ..runner.runs import Parting, Run, partings
from ..runner.ties import tolerance

_DTYPE = "bfloat16"
LADDER = (1, 2, 4, 8, 16)
"""In tolerances: where a difference is no tie, how far from one it is: worse rounding, or another computation."""
_SAMPLE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged(Parting):
    """A parting about which stock was asked, if it was."""

    # most by which level candidates may be apart, for logits of their size; None: not asked
    allowed: float | None = None
    # least of LADDER, times that, by which raising either candidate's logit makes stock take it; None: more
    gap: float | None = None

    @property
    def is_tie(self) -> bool:
        return self.gap is not None and self.allowed is not None and self.gap <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one run compares with stock's."""

    # tokens up to the first difference, over all requests
    compared: int
    partings: tuple[Judged, ...]
    # partings for which stock was asked
    asked: int = 0

    @property
    def ties(self) -> int:
        return sum(parting.is_tie for parting in self.partings)

    @property
    def unproven(self) -> int:
        return len(self.partings) - self.ties

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ties": self.ties, "unproven": self.unproven}


def compare(wanted: Run, found: Run) -> Verdict:
    """Token by token; nobody is asked."""
    parted = {one.request: Judged(**asdict(one)) for one in partings(wanted, found)}
    compared = sum(parted[i].position if i in parted else len(ids) for i, ids in enumerate(wanted.token_ids))
    return Verdict(compared=compared, partings=tuple(parted.values()))


def prove(
    stock: EngineProcess,
    prompts: Sequence[list[int]],
    params: Sequence[dict[str, Any]],
    wanted: Run,
    verdict: Verdict,
    sample: int = _SAMPLE,
) -> Verdict:
    """Ask stock about the first `sample` partings, all at once.

    A parting is a tie if stock itself, on the common prefix, takes either candidate once its logit is raised by the
    tolerance. The V2 runner keys its noise on seed and position, and the prefix puts the token at the same position; so
    with no bias this is the very choice that was made, and the engine itself is the judge of both candidates. (The V1
    runner on a CPU draws its noise in order instead, so there nothing is ever proven.)
    """
    bare = [{name: value for name, value in one.items() if name != "extra_args"} for one in params]
    chosen = []
    for one in [p for p in verdict.partings if p.stock is not None and p.ours is not None][:sample]:
        prefix = [*prompts[one.request], *wanted.token_ids[one.request][: one.position]]
        chosen.append(replace(one, allowed=_allowed(stock, prefix, bare[one.request], one)))
    judged = {one.request: one for one in chosen}
    for factor in LADDER:
        unproven = [one for one in chosen if judged[one.request].gap is None]
        if not unproven:
            break
        prefixes = [[*prompts[p.request], *wanted.token_ids[p.request][: p.position]] for p in unproven]
        took = []
        for candidates in ([p.stock for p in unproven], [p.ours for p in unproven]):
            biased = [
                {**bare[p.request], "max_tokens": 1, "logit_bias": {token: factor * p.allowed}}
                for p, token in zip(unproven, candidates, strict=True)
            ]
            answer = stock.ask("generate", prompts=prefixes, params=biased, is_warm=True)
            took.append([ids[0] == token for ids, token in zip(answer["token_ids"], candidates, strict=True)])
        for p, one, other in zip(unproven, *took, strict=True):
            if one and other:
                judged[p.request] = replace(p, gap=factor * p.allowed)
    return replace(verdict, partings=tuple(judged.get(p.request, p) for p in verdict.partings), asked=len(chosen))


def _allowed(stock: EngineProcess, prefix: list[int], params: dict[str, Any], one: Judged) -> float:
    """Most by which the candidates' logits may be apart, before temperature as a bias is."""
    found = stock.ask("look", prompt=prefix, params=params, at=0, candidates=[one.stock, one.ours])
    temperature = params.get("temperature", 1.0) or 1.0
    return tolerance(_DTYPE, [logit * temperature for logit in found["logits"]])
