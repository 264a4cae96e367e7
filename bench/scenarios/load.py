"""`specrollout bench ramp`: load that changes during the run, and how every budget takes it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from vllm_specrollout.config import BUDGETS, MAX_NODES

from ..runner.budgets import AUTO, BudgetArm, BudgetEngines, Waves, compared, measure_loads, told
from ..runner.engines import OURS
from ..runner.fields import Row
from ..runner.report import Found, Table
from ..runner.rows import Run, make_row
from ..runner.scenario import ModelScenario, Session, command, flag

PATTERNS = ("drain", "fill", "bursts", "bad-drafter", "new-weights")
"""Arrivals depend on how many requests have finished, never on the clock, so that every budget meets the same load."""
PROMPT_LEN = 64


@dataclass(frozen=True, kw_only=True)
class Ramp(ModelScenario):
    """Run loads that change on the way under `auto` and other budgets."""

    bench: ClassVar[str] = "ramp"

    patterns: tuple[str, ...] = flag(PATTERNS, "Load patterns.", "--pattern", choices=PATTERNS)
    budgets: tuple[str, ...] = flag(BUDGETS, "Budgets beside `auto`.", "--budget", choices=BUDGETS)
    requests: int = flag(64, "Requests of a pattern.", within=(8, 256))
    tokens: int = flag(96, "Of the longest answer.", within=(8, 1 << 14))
    accuracy: float = flag(0.8, "Probability that a draft token is right.", within=(0, 1))
    max_draft_tokens: int = flag(7, "Most draft tokens per step.", within=(1, MAX_NODES))

    def arms(self) -> list[BudgetArm]:
        """`auto` first."""
        return [AUTO, *(BudgetArm(name=name) for name in self.budgets if name != AUTO.name)]

    def measure(self, session: Session) -> Found:
        most = self.max_draft_tokens
        more: dict[str, Any] = {
            "shape": {"seqs": self.requests, "length": PROMPT_LEN + self.tokens + 1, "width": 4 * PROMPT_LEN},
            "spec_rollout": {"max_draft_tokens": most, "max_depth": most},
            "units": self.rounds + 1,
        }
        title, rows = measure_loads(self, session, self.patterns, self._compare, **more)
        return Found(model=title, rows=rows)

    def told(self, found: Found) -> Iterator[Table | str]:
        counts = ("steps_on", "steps_off", "switches", "mind_changes")
        return told(found.rows, "pattern", "name: budget", "batch", "speedup", "makespan_s", *counts, "auto_told")

    def _compare(self, engines: BudgetEngines, name: str) -> list[Row]:
        """One pattern under all budgets."""
        waves = pattern(name, self.requests, self.tokens)
        prompts = engines.prompts(self.requests, PROMPT_LEN)[: len(waves.lengths)]
        arms, waves = self.arms(), replace(waves, prompts=prompts, seed=self.seed)
        recorded = engines.recorded(waves)
        engines.set_answers(recorded, self.accuracy, waves.turns_bad_at)
        switches: dict[BudgetArm, dict[str, int]] = {}

        def run(_: str, arm: BudgetArm | None, number: int) -> Run:
            if arm is None:
                return recorded if number < 0 else engines.run_waves(None, waves)
            engines.set_budget(arm, is_fresh=number < 0)
            # counted since it was asked last
            engines.tell(OURS, "switches")
            made = engines.run_waves(arm, waves)
            switches[arm] = engines.tell(OURS, "switches")
            return made

        found = engines.rounds({name: arms}, range(-1, self.rounds), run)
        pairs = {arm: own for (_, arm), own in found.items()}
        rows = {arm: make_row(str(arm), len(waves.prompts), 0, own) for arm, own in pairs.items()}
        judged = {arm: engines.judge(waves, own) for arm, own in pairs.items()}
        lengths = tail_ratio([len(ids) for ids in pairs[AUTO][-1].stock.token_ids])
        shared = {"pattern": name, "seed": self.seed, "length_ratio": lengths}

        def cost(arm: BudgetArm) -> float:
            return statistics.median(pair.ours.wall_s for pair in pairs[arm] if pair.is_timed)

        def fields(arm: BudgetArm, best: BudgetArm | None) -> dict[str, Any]:
            return {**switches[arm], **shared, "best": best and str(best)}

        return compared(rows, pairs, judged, cost, fields, [arm for arm in arms if arm != AUTO])


def pattern(name: str, requests: int, tokens: int) -> Waves:
    """The pattern of this name for about so many requests, the longest of about so many tokens."""
    short, few, more = max(4, tokens // 4), max(requests // 8, 3), {}
    if name == "drain":
        # a long tail: most are short, a few close to `tokens`
        lengths = [max(4, round(tokens * ((i + 1) / requests) ** 3)) for i in range(requests)]
        arrives = [0] * requests
    elif name == "fill":
        # 1, then 4, 16, ... more: each wave comes when the first answer of the last one ends, while the others go on
        lengths, arrives, finished = [short], [0], 0
        while len(lengths) < requests:
            finished += 1
            size = min(4**finished, requests - len(lengths))
            lengths += [short, *(tokens,) * (size - 1)]
            arrives += [finished] * size
    elif name == "bursts":
        # three, of short answers, beside one long one; each comes when the last one is over
        size = max((requests - 1) // 3, 1)
        lengths = [tokens, *(short,) * 3 * size]
        arrives = [0, *(burst * size for burst in range(3) for _ in range(size))]
    elif name == "bad-drafter":
        lengths, arrives, more = [tokens] * few, [0] * few, {"turns_bad_at": tokens // 2}
    else:
        # one short answer, at whose end the weights change
        lengths, arrives, more = [tokens // 2, *(tokens,) * (few - 1)], [0] * few, {"reload_after": 1}
    return Waves(lengths=tuple(lengths), arrives_after=tuple(arrives), **more)


def tail_ratio(lengths: Sequence[int]) -> float:
    """The 75th percentile of the lengths by the longest; below 0.2 is a long tail."""
    ordered = sorted(lengths)
    return ordered[(len(ordered) - 1) * 3 // 4] / ordered[-1]


bench_ramp = command(Ramp)
