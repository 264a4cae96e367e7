"""`specrollout bench sweep`: `auto` against stock and against every fixed draft length, over batches and accuracies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_specrollout.cli import flags as cli_flags
from vllm_specrollout.config import MAX_NODES

from ..runner.budgets import AUTO, BudgetArm, BudgetEngines, Waves, compared, measure_loads, told
from ..runner.fields import Row
from ..runner.report import Found, Table
from ..runner.rows import Judged, Pair, Run, first_difference, make_row, speedup
from ..runner.scenario import ModelScenario, Session, command, flag

PROMPT_LEN = 64
"""Most tokens of a prompt: short, so that the runs are decoding."""
LIMIT = 0.97
"""The least of both ratios that is wanted: auto to stock, and auto to the best fixed draft length."""
HOPELESS = 0.85
"""Longer drafts are not tried in a cell where one reached less than this share of the best before it."""
_TOKENS = {1: 64, 2: 64, 4: 48, 8: 40, 16: 32, 32: 24, 256: 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCell:
    """One batch at one quality of drafts."""

    batch: int
    accuracy: float

    def __str__(self) -> str:
        return f"batch {self.batch}, accuracy {self.accuracy:g}"


@dataclass(frozen=True, kw_only=True)
class Sweep(ModelScenario):
    """Compare `auto` with stock and with every fixed draft length, at many batches and qualities of drafts."""

    bench: ClassVar[str] = "sweep"

    batches: tuple[int, ...] = flag((1, 2, 4, 8, 16, 32, 64), "Requests at once.", "--batch", within=(1, 256))
    accuracies: tuple[float, ...] = flag(
        (0.5, 0.7, 0.9, 0.0), "Probabilities that a draft token is right.", "--accuracy", parse=cli_flags.shares
    )
    drafts: tuple[int, ...] = flag((1, 3, 7, 15), "Fixed draft lengths.", "--draft", within=(1, MAX_NODES))
    tokens: int | None = flag(None, "Tokens per request; default: 20 to 64, by batch.", within=(4, 1 << 16))

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "tokens": {str(batch): self.tokens_of(batch) for batch in self.batches}}

    def tokens_of(self, batch: int) -> int:
        """Tokens per request: fewer at large batches, whose steps take long."""
        if self.tokens is not None:
            return self.tokens
        return next(tokens for most, tokens in _TOKENS.items() if batch <= most)

    def cells(self) -> list[SweepCell]:
        return [SweepCell(batch=batch, accuracy=accuracy) for batch in self.batches for accuracy in self.accuracies]

    def spec_rollout(self) -> dict[str, Any]:
        """Our engine's configuration: chains, as long as the longest asked for."""
        longest = max(self.drafts)
        return {"shape": "chain", "max_draft_tokens": longest, "max_depth": longest}

    def measure(self, session: Session) -> Found:
        length = PROMPT_LEN + max(map(self.tokens_of, self.batches)) + 1
        shape = {"seqs": max(self.batches), "length": length, "width": PROMPT_LEN + MAX_NODES}
        more = {"shape": shape, "spec_rollout": self.spec_rollout(), "units": self.rounds}
        title, rows = measure_loads(self, session, self.cells(), self._compare, **more)
        return Found(model=title, rows=rows)

    def told(self, found: Found) -> Iterator[Table | str]:
        shown = ("accuracy", "batch", "name", "draft", "speedup", "auto_to_best: auto / best fixed", "best_draft: best")
        yield from told(found.rows, *shown)
        for field, title in (("speedup", "auto / stock"), ("auto_to_best", "auto / best fixed")):
            told_of = [row for row in found.rows if row.name == AUTO.name and getattr(row, field) is not None]
            for worst in sorted(told_of, key=lambda row: getattr(row, field))[:1]:
                where = SweepCell(batch=worst.batch, accuracy=worst.accuracy)
                yield f"{title}: worst {getattr(worst, field):.3f} ({where}) of {len(told_of)}; wanted: {LIMIT}"

    def _compare(self, engines: BudgetEngines, cell: SweepCell) -> list[Row]:
        """The cell's rows."""
        batch = cell.batch
        prompts = engines.prompts(max(self.batches), PROMPT_LEN)[:batch]
        lengths, arrives = (self.tokens_of(batch),) * batch, (0,) * batch
        waves = Waves(prompts=prompts, seed=self.seed, lengths=lengths, arrives_after=arrives)
        pairs = self._pairs(engines, cell, waves)
        judged = {arm: engines.judge(waves, own) for arm, own in pairs.items()}
        return cell_rows(cell, self.seed, pairs, judged)

    def _pairs(self, engines: BudgetEngines, cell: SweepCell, waves: Waves) -> dict[BudgetArm, list[Pair]]:
        stock = engines.recorded(waves)
        engines.set_answers(stock, cell.accuracy)
        engines.report(f"{cell}: warm-up", 0)
        engines.set_budget(AUTO)
        warm_up = engines.run_waves(AUTO, waves)
        if first_difference(stock, warm_up) is not None:
            # no speed of this cell will be told, so one pair is enough
            return {AUTO: [Pair(stock=stock, ours=warm_up)]}
        arms = [AUTO, *(BudgetArm(name="fixed", max_draft_tokens=draft) for draft in self.drafts)]
        speeds: list[float] = []
        left_out: set[BudgetArm] = set()

        def tried(_: SweepCell, arm: BudgetArm | None, number: int) -> Run | None:
            """In the first round longer drafts after shorter ones, until one is clearly worse."""
            if arm is not None and number == 0 and is_hopeless(speeds):
                left_out.add(arm)
            if arm in left_out:
                return None
            if arm is not None:
                # `auto` comes back as it was left, with what its warm-up taught it
                engines.set_budget(arm, is_fresh=arm != AUTO)
            found = engines.run_waves(arm, waves)
            if arm not in (None, AUTO):
                speeds.append(1.0 / found.wall_s)
            return found

        pairs = {arm: own for (_, arm), own in engines.rounds({cell: arms}, range(self.rounds), tried).items() if own}
        pairs[AUTO].insert(0, Pair(stock=stock, ours=warm_up, is_timed=False))
        return pairs


def cell_rows(
    cell: SweepCell, seed: int, pairs: Mapping[BudgetArm, Sequence[Pair]], judged: Mapping[BudgetArm, Judged]
) -> list[Row]:
    """The rows of a cell, `auto` first."""
    rows = {arm: make_row(arm.name, cell.batch, arm.max_draft_tokens or 0, own) for arm, own in pairs.items()}
    rounds = sum(pair.is_timed for pair in pairs[AUTO])
    fixed = [arm for arm, own in pairs.items() if arm != AUTO and sum(pair.is_timed for pair in own) == rounds]

    def fields(_: BudgetArm, best: BudgetArm | None) -> dict[str, Any]:
        return {"accuracy": cell.accuracy, "seed": seed, "best_draft": best and best.max_draft_tokens}

    return compared(rows, pairs, judged, lambda arm: -speedup(pairs[arm]), fields, fixed)


def is_hopeless(speeds: Sequence[float]) -> bool:
    """Whether still longer drafts need not be tried, by those tried so far, in ascending order of length."""
    return len(speeds) > 1 and speeds[-1] < HOPELESS * max(speeds[:-1])


bench_sweep = command(Sweep)
