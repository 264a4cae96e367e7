"""One stock engine, and one of ours whose budget and oracle change between runs; what sweep and ramp share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .engines import IN_ONE_PROCESS, OURS, STOCK, Engines, Report, sampling, write_answers
from .rows import SPEEDS, Pair, Row, ratio
from .runs import Run

SEEDS = 3
"""How many seeds are tried where stock vLLM itself meets a tie; see docs/concepts/exactness.md."""
SEED_STEP = 1_000_003
R = TypeVar("R", bound=Row)


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

    def begin(self) -> None:
        self.start(STOCK)
        self.start(OURS, self._spec_rollout)

    def set_budget(self, budget: Budget, *, is_fresh: bool = True) -> None:
        """A fresh budget, which has learned nothing yet; or this one as it was left, which goes on learning."""
        self[OURS].ask("order_queue", longest_first=budget.longest_first)
        limits = dict.fromkeys(("max_draft_tokens", "max_depth"), budget.max_draft_tokens)
        self[OURS].ask("rpc", method="spec_rollout_set_budget", name=budget.name, is_fresh=is_fresh, **limits)

    def run_waves(
        self,
        arm: Budget | None,
        prompts: Sequence[list[int]],
        seed: int,
        lengths: Sequence[int],
        arrives_after: Sequence[int] = (),
        reload_after: int | None = None,
        *,
        is_to_the_end: bool = True,
    ) -> Run:
        """By stock (None) or the present budget: requests that arrive once so many others have finished.

        Args:
            seed: of the first request's noise.
            lengths: most tokens of each answer.
            arrives_after, reload_after: see `engine_child.Engine`; default: all at once, never.
        """
        options = [None if arm is None else {"problem_id": str(i)} for i in range(len(prompts))]
        each = enumerate(zip(lengths, options, strict=True))
        params = [sampling(seed + i, length, one, is_to_the_end=is_to_the_end) for i, (length, one) in each]
        arrives = list(arrives_after) or [0] * len(prompts)
        waves = {"arrives_after": arrives, "reload_after": reload_after, "folder": str(self._arguments["model"])}
        return self.run(STOCK if arm is None else OURS, prompts, params, "generate_in_waves", **waves)

    def set_answers(self, run: Run, accuracy: float, position: int | None = None) -> None:
        """What the oracle drafts: stock's answers, under the requests' numbers; from `position` on, decoys only."""
        path = write_answers(self._oracle, {str(i): ids for i, ids in enumerate(run.token_ids)})
        self[OURS].ask("rpc", method="spec_rollout_set_oracle", path=str(path), accuracy=[accuracy], position=position)

    def switches(self) -> dict[str, int]:
        """How often the present budget went on and off since the last call."""
        return self[OURS].ask("rpc", method="spec_rollout_switches")


def first_identical(seed: int, begin: int, rows_of: Callable[[int], list[R]]) -> tuple[list[R], int]:
    """(rows, number of the seed) of the first seed whose outputs are all stock's; of the last one if there is none.

    A seed whose outputs differ met a tie of stock's own.
    """
    rows: list[R] = []
    for number in range(begin, begin + SEEDS):
        rows = rows_of(seed + number * SEED_STEP)
        if all(row.identical for row in rows):
            break
    return rows, number


def compared(
    cls: type[R],
    rows: Mapping[Budget, Row],
    pairs: Mapping[Budget, Sequence[Pair]],
    cost: Callable[[Budget], float],
    fields: Callable[[Budget, Budget | None], dict[str, Any]],
    rivals: Sequence[Budget],
) -> list[R]:
    """The rows with their scenario's fields; that of `auto` is compared with the best of the others.

    Where one budget's outputs differ, there is nothing to compare any speed with.

    Args:
        rows, pairs: of every budget.
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
        found.append(cls(**values, is_comparable=is_comparable, auto_to_best=against, **fields(arm, told)))
    return found
