"""One stock engine, and one of ours whose budget and oracle change between runs; what sweep and ramp share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .engines import IN_ONE_PROCESS, OURS, STOCK, Engines, Report, sampling, write_answers
from .rows import SPEEDS, Judged, Pair, Row, judge, ratio
from .runs import Parting, Run

_JUDGE = "judge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A budget of our engine, and its limits where they are not the engine's."""

    name: str
    # None: the engine's
    max_draft_tokens: int | None = None
    # whether waiting requests get their places longest first
    longest_first: bool = True

    @property
    def title(self) -> str:
        draft = "" if self.max_draft_tokens is None else f" {self.max_draft_tokens}"
        return self.name + draft + ("" if self.longest_first else " without longest first")


AUTO = Budget(name="auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """Requests that arrive once so many others have finished."""

    prompts: Sequence[list[int]]
    # of the first request's noise
    seed: int
    # most tokens of each answer
    lengths: Sequence[int]
    # see `engine_child.Engine`; default: all at once, never
    arrives_after: Sequence[int] = ()
    reload_after: int | None = None
    is_to_the_end: bool = True

    def arrives(self) -> list[int]:
        return list(self.arrives_after) or [0] * len(self.prompts)

    def params(self, i: int, is_ours: bool) -> dict[str, Any]:
        """Of one request."""
        own = {"problem_id": str(i)} if is_ours else None
        return sampling(self.seed + i, self.lengths[i], own, is_to_the_end=self.is_to_the_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow(Row):
    """A row of one budget beside others."""

    # of the first request's noise
    seed: int
    # False: outputs differ, be it at ties, so no speed is told
    is_comparable: bool
    # where outputs part and stock's own rounding decides, in words
    ties: list[str]
    # whether outputs are stock's, or part at such ties only
    is_proven: bool
    # the best other makespan / this one's, median over rounds; on the row of `auto` only
    auto_to_best: float | None

    @property
    def reason(self) -> str | None:
        """Why its speed is not told, if it is for its own outputs."""
        return f"a proven tie: {self.ties[0]}" if self.is_proven and self.ties else self.difference


R = TypeVar("R", bound=ComparedRow)


class BudgetEngines(Engines):
    """Both engines, each in one process; a context manager.

    Args:
        spec_rollout: our engine's configuration.
        scratch: folder for what the oracle drafts.
    """

    def __init__(
        self, arguments: dict[str, Any], report: Report, *, spec_rollout: dict[str, Any], scratch: Path, **common: Any
    ) -> None:
        super().__init__(arguments, report, environment=IN_ONE_PROCESS, **common)
        self._oracle = write_answers(scratch / "oracle.json", {})
        if "oracle" in spec_rollout["drafters"]:
            spec_rollout = {**spec_rollout, "oracle": {"path": str(self._oracle)}}
        self._spec_rollout = spec_rollout
        # a parting, what came before it and of whom -> whether it is a tie, and why
        self._known: dict[Any, tuple[bool, str]] = {}

    def begin(self) -> None:
        self.start(STOCK)
        self.start(OURS, self._spec_rollout)

    def set_budget(self, budget: Budget, *, is_fresh: bool = True) -> None:
        """A fresh budget, which has learned nothing yet; or this one as it was left, which goes on learning."""
        self[OURS].ask("order_queue", longest_first=budget.longest_first)
        limits = dict.fromkeys(("max_draft_tokens", "max_depth"), budget.max_draft_tokens)
        self[OURS].ask("rpc", method="spec_rollout_set_budget", name=budget.name, is_fresh=is_fresh, **limits)

    def run_waves(self, arm: Budget | None, waves: Waves) -> Run:
        """By stock (None) or the present budget."""
        more = {"arrives_after": waves.arrives(), "reload_after": waves.reload_after}
        params = [waves.params(i, arm is not None) for i in range(len(waves.prompts))]
        folder = str(self._arguments["model"])
        name = STOCK if arm is None else OURS
        return self.run(name, waves.prompts, params, "generate_in_waves", folder=folder, **more)

    def judge(self, waves: Waves, pairs: Sequence[Pair]) -> Judged:
        """Of every request whose tokens differ, whether it is where stock itself met a tie.

        The engine that tells is started when it is needed first: those that are timed tell no logits.
        """

        def ask(one: Parting, answer: tuple[int, ...]) -> tuple[bool, str]:
            key = (one, answer[: one.position], tuple(waves.prompts[one.request]), waves.seed)
            if key not in self._known:
                self._known[key] = self._ask(waves, one, answer)
            return self._known[key]

        return judge(pairs, ask)

    def _ask(self, waves: Waves, parting: Parting, answer: Sequence[int]) -> tuple[bool, str]:
        # imports torch and vLLM, which nothing else here needs while engines are timed
        from .ties import JUDGE, asked

        if _JUDGE not in self._processes:
            most = max(self._arguments["max_num_batched_tokens"], self._arguments["max_model_len"])
            self.start(_JUDGE, max_num_batched_tokens=most, **JUDGE)
        request, dtype = parting.request, self._arguments["dtype"]
        params, prompt = waves.params(request, False), waves.prompts[request]
        return asked(self[_JUDGE], prompt, params, answer, parting, dtype, is_given=True)

    def set_answers(self, run: Run, accuracy: float, position: int | None = None) -> None:
        """What the oracle drafts: stock's answers, under the requests' numbers; from `position` on, decoys only."""
        path = write_answers(self._oracle, {str(i): ids for i, ids in enumerate(run.token_ids)})
        self[OURS].ask("rpc", method="spec_rollout_set_oracle", path=str(path), accuracy=[accuracy], position=position)

    def switches(self) -> dict[str, int]:
        """How often the present budget went on and off since the last call."""
        return self[OURS].ask("rpc", method="spec_rollout_switches")


def compared(
    cls: type[R],
    rows: Mapping[Budget, Row],
    pairs: Mapping[Budget, Sequence[Pair]],
    judged: Mapping[Budget, Judged],
    cost: Callable[[Budget], float],
    fields: Callable[[Budget, Budget | None], dict[str, Any]],
    rivals: Sequence[Budget],
) -> list[R]:
    """The rows with their scenario's fields; that of `auto` is compared with the best of the others.

    Where one budget's outputs differ, there is nothing to compare any speed with.

    Args:
        rows, pairs, judged: of every budget.
        cost: least for the best one.
        fields: more of a budget's row; told the best other one for `auto`.
        rivals: which may be the best.
    """
    is_comparable = all(row.identical for row in rows.values())
    best = min(rivals, key=cost, default=None) if is_comparable else None
    found = []
    for arm, row in rows.items():
        told = best if arm == AUTO else None
        against = None if told is None else ratio(pairs[told], pairs[AUTO])
        values = {name: getattr(row, name) for name in Row.__dataclass_fields__}
        values |= {} if is_comparable else dict.fromkeys(SPEEDS)
        values |= {"difference": judged[arm].differences[0]} if judged[arm].differences else {}
        proof = {"ties": judged[arm].ties, "is_proven": not judged[arm].differences}
        found.append(cls(**values, **proof, is_comparable=is_comparable, auto_to_best=against, **fields(arm, told)))
    return found
