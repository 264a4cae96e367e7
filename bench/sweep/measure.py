"""Runs a sweep cell by cell: stock and all budgets interleaved, in one pair of engines."""

from __future__ import annotations

from collections.abc import Callable

from ..common.rows import Pair
from ..common.runs import Run
from ..common.tuned import AUTO, SEED_STEP, SEEDS, Budget, Engines, differs
from ..policy.reward import problems
from ..policy.tokenizer import prompt_text
from .plan import PROMPT_LEN, Cell, Plan, SweepRow, cell_rows, is_hopeless, params

Report = Callable[[str, int], None]
"""Told what happens now, and how many cells are done since."""
_Pairs = dict[Budget, list[Pair]]


def run_sweep(
    plan: Plan, engines: Engines, report: Report, on_cell: Callable[[list[SweepRow]], None]
) -> list[SweepRow]:
    """All cells, in the plan's order; `on_cell` hears of each one's rows."""
    texts = [prompt_text(problem.prompt) for problem in problems(max(plan.batches), seed=0)]
    encoded = engines.stock.ask("encode", texts=texts)
    prompts = [ids[:PROMPT_LEN] for ids in encoded]
    sweep = _Sweep(plan, engines, prompts, report)
    rows: list[SweepRow] = []
    for cell in plan.cells():
        own = sweep.cell(cell)
        on_cell(own)
        rows += own
        report("", 1)
    return rows


class _Sweep:
    def __init__(self, plan: Plan, engines: Engines, prompts: list[list[int]], report: Report) -> None:
        self.plan, self.engines, self.prompts, self.report = plan, engines, prompts, report
        # stock's answers, also its warm-up: (batch, seed) -> run
        self._answers: dict[tuple[int, int], Run] = {}
        # batch -> the seed that met no tie last: cells of one batch share it
        self._seed: dict[int, int] = {}

    def cell(self, cell: Cell) -> list[SweepRow]:
        """The cell's rows with the first seed whose outputs are all stock's; with the last one if there is none."""
        first = self._seed.get(cell.batch, 0)
        rows: list[SweepRow] = []
        for number in range(first, first + SEEDS):
            seed = self.plan.seed + number * SEED_STEP
            rows = cell_rows(cell, seed, self._pairs(cell, seed))
            if all(row.is_comparable for row in rows):
                self._seed[cell.batch] = number
                break
        return rows

    def _pairs(self, cell: Cell, seed: int) -> _Pairs:
        stock = self._recorded(cell, seed)
        if cell.accuracy is not None:
            self.engines.set_answers(stock, cell.accuracy)
        pairs: _Pairs = {AUTO: [], **{arm: [] for arm in self.plan.fixed()}}
        self.engines.set_budget(AUTO)
        self.report(f"{cell.title}: warm-up", 0)
        pairs[AUTO].append(Pair(stock=stock, ours=self._run(cell, seed), is_timed=False))
        if differs(stock, [pairs[AUTO][0].ours]):
            # another seed is needed; one timed pair is enough for a row without times
            return {AUTO: [Pair(stock=stock, ours=pairs[AUTO][0].ours)]}
        for number in range(self.plan.rounds):
            self.report(f"{cell.title}: round {number + 1} of {self.plan.rounds}", 0)
            self._round(cell, seed, number, pairs)
        return {arm: own for arm, own in pairs.items() if own}

    def _round(self, cell: Cell, seed: int, number: int, pairs: _Pairs) -> None:
        """One run of each: stock in the middle in odd rounds, first in even ones; longer drafts after shorter ones."""
        tried = [arm for arm in pairs if arm == AUTO or number == 0 or pairs[arm]]
        is_stock_first = number % 2 == 0
        stock = self._stock(cell, seed) if is_stock_first else None
        runs: dict[Budget, Run] = {}
        order = tried if is_stock_first else tried[::-1]
        for arm in order:
            if stock is None and len(runs) * 2 >= len(order):
                stock = self._stock(cell, seed)
            self._use(arm)
            runs[arm] = self._run(cell, seed)
            if number == 0 and arm != AUTO and self._is_hopeless(runs):
                break
        stock = stock or self._stock(cell, seed)
        for arm, run in runs.items():
            pairs[arm].append(Pair(stock=stock, ours=run))

    def _is_hopeless(self, runs: dict[Budget, Run]) -> bool:
        return is_hopeless([1.0 / run.wall_s for arm, run in runs.items() if arm != AUTO])

    def _use(self, arm: Budget) -> None:
        """Put a budget in; `auto` comes back as it was left, with what its warm-up round taught it."""
        self.engines.set_budget(arm, is_fresh=arm != AUTO)

    def _recorded(self, cell: Cell, seed: int) -> Run:
        key = (cell.batch, seed)
        if key not in self._answers:
            self._answers[key] = self._stock(cell, seed)
        return self._answers[key]

    def _stock(self, cell: Cell, seed: int) -> Run:
        values = params(self.plan, cell.batch, seed, is_ours=False)
        return self.engines.run(self.engines.stock, self.prompts[: cell.batch], values)

    def _run(self, cell: Cell, seed: int) -> Run:
        values = params(self.plan, cell.batch, seed, is_ours=True)
        return self.engines.run(self.engines.ours, self.prompts[: cell.batch], values)
