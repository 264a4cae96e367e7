"""One stock engine, and one of ours whose budget and oracle change between runs; what sweep and ramp share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .engine_process import EngineProcess
from .engines import IN_ONE_PROCESS, OURS, STOCK, Engines, Report, sampling, write_answers
from .fields import Row, columns
from .models import find_model
from .oracle import ORACLE
from .report import Table
from .rows import UNTOLD, Judged, Pair, Run, ratio
from .scenario import ModelScenario, Session
from .ties import JUDGE, judge

_JUDGE = "judge"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetArm:
    """A budget of our engine, and its limits where they are not the engine's."""

    name: str
    # None: the engine's
    max_draft_tokens: int | None = None

    def __str__(self) -> str:
        return self.name + ("" if self.max_draft_tokens is None else f" {self.max_draft_tokens}")


AUTO = BudgetArm(name="auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """One load: requests that arrive once so many others have finished."""

    # of each request: most tokens of its answer, and ascending, after how many others it arrives
    lengths: tuple[int, ...]
    arrives_after: tuple[int, ...]
    # output position of each request after which the drafter is bad; None: never
    turns_bad_at: int | None = None
    # the weights are loaded anew once so many have finished; None: never
    reload_after: int | None = None
    prompts: Sequence[list[int]] = ()
    # of the first request's noise
    seed: int = 0

    def params(self, is_ours: bool) -> list[dict[str, Any]]:
        """Of each request."""
        return [
            sampling(self.seed + i, n, {"problem_id": str(i)} if is_ours else None, is_to_the_end=True)
            for i, n in enumerate(self.lengths)
        ]


L = TypeVar("L")


class BudgetEngines(Engines):
    """Both engines, each in one process; a context manager.

    Args:
        oracle: file of what the oracle drafts.
    """

    def __init__(self, arguments: dict[str, Any], report: Report, *, oracle: Path, **common: Any) -> None:
        super().__init__(arguments, report, environment=IN_ONE_PROCESS, **common)
        self._oracle = oracle
        self._recorded: dict[str, Run] = {}
        # what was asked about ties, and its answers
        self._known: dict[Any, tuple[bool, str]] = {}

    def set_budget(self, budget: BudgetArm, *, is_fresh: bool = True) -> None:
        """A fresh budget, which has learned nothing yet; or this one as it was left, which goes on learning."""
        limits = dict.fromkeys(("max_draft_tokens", "max_depth"), budget.max_draft_tokens)
        self.tell(OURS, "set_budget", name=budget.name, is_fresh=is_fresh, **limits)

    def run_waves(self, arm: BudgetArm | None, waves: Waves) -> Run:
        """By stock (None) or the present budget."""
        more = {"arrives_after": list(waves.arrives_after), "reload_after": waves.reload_after}
        folder, is_ours = str(self._arguments["model"]), arm is not None
        return self.run(OURS if is_ours else STOCK, waves.prompts, waves.params(is_ours), folder=folder, **more)

    def recorded(self, waves: Waves) -> Run:
        """Stock's answers, given twice when they are asked for first."""
        key = json.dumps([waves.prompts, waves.lengths, waves.arrives_after, waves.reload_after])
        if key not in self._recorded:
            self.run_waves(None, waves)
            self._recorded[key] = self.run_waves(None, waves)
        return self._recorded[key]

    def judge(self, waves: Waves, pairs: Sequence[Pair]) -> Judged:
        """The engine that tells is started when it is needed first: those that are timed tell no logits."""

        def stock() -> EngineProcess:
            if _JUDGE not in self._processes:
                most = max(self._arguments["max_num_batched_tokens"], self._arguments["max_model_len"])
                self.start(_JUDGE, max_num_batched_tokens=most, **JUDGE)
            return self[_JUDGE]

        return judge(stock, waves.prompts, waves.params(False), pairs, self._arguments["dtype"], self._known)

    def set_answers(self, run: Run, accuracy: float, position: int | None = None) -> None:
        """What the oracle drafts: stock's answers, under the requests' numbers; from `position` on, decoys only."""
        path = write_answers(self._oracle, {str(i): ids for i, ids in enumerate(run.token_ids)})
        self.tell(OURS, "set_oracle", path=str(path), accuracy=[accuracy], position=position)


def measure_loads(
    scenario: ModelScenario,
    session: Session,
    loads: Sequence[L],
    compare: Callable[[BudgetEngines, L], list[Row]],
    *,
    shape: dict[str, int],
    spec_rollout: dict[str, Any],
    units: int,
) -> tuple[str, list[Row]]:
    """(the model's title, the rows of all loads).

    Args:
        units: of progress, for each load.
    """
    model, display = scenario.model, session.display
    folder, title = find_model(model, scenario.size, scenario.dtype, scenario.cache, display, is_policy=False)
    report, rows = display.steps(len(loads) * units + 2), []
    oracle = write_answers(session.scratch / "oracle.json", {})
    with scenario.make_engines(folder, report, **shape, kind=BudgetEngines, oracle=oracle) as engines:
        engines.start(STOCK)
        engines.start(OURS, {**spec_rollout, "drafters": [{"name": ORACLE, "path": str(oracle)}]})
        for load in loads:
            rows += compare(engines, load)
    return title, rows


def compared(
    rows: Mapping[BudgetArm, Row],
    pairs: Mapping[BudgetArm, Sequence[Pair]],
    judged: Mapping[BudgetArm, Judged],
    cost: Callable[[BudgetArm], float],
    fields: Callable[[BudgetArm, BudgetArm | None], dict[str, Any]],
    rivals: Sequence[BudgetArm],
) -> list[Row]:
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
        against, own = best if arm == AUTO else None, judged[arm]
        told: dict[str, Any] = {**fields(arm, against), **({} if is_comparable else UNTOLD)}
        told |= {"difference": own.differences[0]} if own.differences else {}
        told |= {"ties": own.ties, "is_proven": not own.differences, "is_comparable": is_comparable}
        told["auto_to_best"] = None if against is None else ratio(pairs[against], pairs[AUTO])
        found.append(row.but(**told))
    return found


def told(rows: Sequence[Row], *shown: str) -> Iterator[Table | str]:
    """A table of these fields; and of each row that tells no speed for its own outputs, why."""
    yield Table(rows, columns(*shown))
    for row in rows:
        if not row.identical:
            why = f"a proven tie: {row.ties[0]}" if row.is_proven and row.ties else row.difference
            yield f"{row.name}, batch {row.batch}: {why}"
