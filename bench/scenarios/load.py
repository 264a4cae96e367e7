"""`specrollout bench ramp`: load that changes during the run, and how every budget takes it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rich.console import Console

from vllm_specrollout.config import BUDGETS, MAX_NODES

from ..policy.reward import problems
from ..runner.budgets import AUTO, Budget, BudgetEngines, Waves, compared, measure_loads, reason
from ..runner.engines import OURS
from ..runner.fields import Row
from ..runner.oracle import ORACLE
from ..runner.report import Found
from ..runner.rows import Run, make_row
from ..runner.scenario import ModelScenario, Session, command, flag
from .rollout import DRAFTERS

PATTERNS = ("drain", "fill", "bursts", "bad-drafter", "new-weights")
"""Arrivals depend on how many requests have finished, never on the clock, so that every budget meets the same load."""
PROMPT_LEN = 64
TAIL = "tail"
WITHIN = 0.95
"""`auto` may take 5 % longer than the best other budget."""
TAIL_GAIN = 1.15
"""Targets of expected lengths in a long-tail rollout, for drafts and the queue's order together."""
MOST_SWITCHES = 2
NUM_SHORT, NUM_LONG = 36, 4
"""Answers of the long tail: many short ones, few long ones."""
_TAIL_TOKENS, _TOKENS = 1024, 96
_POOL = 400
_EPOCHS = 4
"""Passes over a tail's problems, with other noise, before anything is timed: what lengths are learned from."""


@dataclass(frozen=True, kw_only=True)
class Ramp(ModelScenario):
    """Run loads that change on the way under `auto` and other budgets; or, with --tail, a long-tail rollout."""

    bench: ClassVar[str] = "ramp"

    patterns: tuple[str, ...] = flag(PATTERNS, "Load patterns.", "--pattern", choices=PATTERNS)
    budgets: tuple[str, ...] = flag(BUDGETS, "Budgets beside `auto`.", "--budget", choices=BUDGETS)
    is_tail: bool = flag(
        False, "Long-tail rollout of the project's policy, with and without longest-first queueing.", "--tail"
    )
    requests: int = flag(64, "Requests of a pattern.", within=(8, 256))
    tokens: int | None = flag(None, "Of the longest answer; default: 96, with --tail 1024.", within=(8, 1 << 14))
    accuracy: float = flag(0.8, "Probability that a draft token is right.", within=(0, 1))
    max_draft_tokens: int = flag(7, "Most draft tokens per step.", within=(1, MAX_NODES))
    rounds: int = flag(3, "Timed rounds; the medians are reported.", within=(1, 1000))
    places: int = flag(8, "Requests at once, with --tail.", "--batch", within=(1, 256))

    def resolved(self) -> Ramp:
        if not self.is_tail:
            return replace(self, tokens=self.tokens or _TOKENS)
        tokens = self.tokens or _TAIL_TOKENS
        return replace(self, requests=NUM_SHORT + NUM_LONG, tokens=tokens)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "patterns": self.loads()}

    def loads(self) -> tuple[str, ...]:
        """Names of what is run."""
        return (TAIL,) if self.is_tail else self.patterns

    @property
    def seqs(self) -> int:
        """Requests at once."""
        return self.places if self.is_tail else self.requests

    def arms(self) -> list[Budget]:
        """`auto` first."""
        if self.is_tail:
            return [AUTO, replace(AUTO, longest_first=False)]
        return [AUTO, *(Budget(name=name) for name in self.budgets if name != AUTO.name)]

    def measure(self, session: Session) -> Found:
        assert self.tokens is not None
        length = (4 if self.is_tail else 1) * PROMPT_LEN + self.tokens + 1
        most, drafters = self.max_draft_tokens, list(DRAFTERS) if self.is_tail else [ORACLE]
        more: dict[str, Any] = {
            "shape": {"seqs": self.seqs, "length": length, "width": 4 * PROMPT_LEN},
            "spec_rollout": {"drafters": drafters, "max_draft_tokens": most, "max_depth": most},
            "is_policy": self.is_tail and self.model is None,
            "units": self.rounds + 1,
        }
        title, rows = measure_loads(self, session, self.loads(), self._compare, pattern_lines, **more)
        return Found(model=title, rows=rows, extra={"summary": summary(rows)})

    def show(self, found: Found, out: Console) -> None:
        """Each pattern was told when it was over."""

    def _waves(self, engines: BudgetEngines, name: str) -> Waves:
        tokens = self.tokens or _TOKENS
        if name != TAIL:
            waves = pattern(name, self.requests, tokens)
            prompts = engines.prompts(self.requests, PROMPT_LEN)[: len(waves.lengths)]
            return replace(waves, prompts=prompts, seed=self.seed)
        # many of few terms, few of many; answers grow with the square of the terms
        pool = problems(_POOL, seed=self.seed)
        chosen = [pool[i] for i in tail([one.size for one in pool], self.seed, NUM_SHORT, NUM_LONG)]
        more = {"prompts": engines.encode(chosen), "seed": self.seed, "is_to_the_end": False}
        return Waves(name=name, lengths=(tokens,) * len(chosen), arrives_after=(0,) * len(chosen), **more)

    def _compare(self, engines: BudgetEngines, name: str) -> list[Row]:
        """One pattern under all budgets."""
        arms, waves = self.arms(), self._waves(engines, name)
        recorded = engines.recorded(waves)
        if not self.is_tail:
            engines.set_answers(recorded, self.accuracy, waves.turns_bad_at)
        switches: dict[Budget, dict[str, int]] = {}

        def run(_: str, arm: Budget | None, number: int) -> Run:
            if arm is None:
                return recorded if number < 0 else engines.run_waves(None, waves)
            engines.set_budget(arm, is_fresh=number < 0)
            if self.is_tail and number < 0 and arm.longest_first:
                # earlier epochs: other answers to the same problems
                for epoch in range(1, _EPOCHS + 1):
                    engines.run_waves(arm, replace(waves, seed=self.seed + epoch * len(waves.prompts)))
            # counted since it was asked last
            engines.tell(OURS, "switches")
            made = engines.run_waves(arm, waves)
            switches[arm] = engines.tell(OURS, "switches")
            return made

        found = engines.rounds({name: arms}, range(-1, self.rounds), run)
        pairs = {arm: own for (_, arm), own in found.items()}
        rows = {arm: make_row(str(arm), min(len(waves.prompts), self.seqs), 0, own) for arm, own in pairs.items()}
        judged = {arm: engines.judge(waves, own) for arm, own in pairs.items()}
        lengths = tail_ratio([len(ids) for ids in pairs[AUTO][-1].stock.token_ids])
        shared = {"pattern": name, "seed": self.seed, "length_ratio": lengths}

        def cost(arm: Budget) -> float:
            return statistics.median(pair.ours.wall_s for pair in pairs[arm] if pair.is_timed)

        def fields(arm: Budget, best: Budget | None) -> dict[str, Any]:
            return {**switches[arm], **shared, "best": best and str(best)}

        return compared(rows, pairs, judged, cost, fields, [arm for arm in arms if arm != AUTO])


def pattern_lines(rows: Sequence[Row]) -> Iterator[str]:
    auto = rows[0]
    head = f"{auto.pattern}: {auto.num_requests} requests, {auto.batch} at once, seed {auto.seed}, "
    yield head + f"p75/max {auto.length_ratio:.2f}"
    for row in rows:
        time = "not comparable" if row.speedup is None else f"{row.makespan_s:7.2f} s  {row.speedup:.2f}x stock"
        counts = f"on {row.steps_on}, off {row.steps_off} steps, {row.switches} switches ({row.mind_changes} by choice)"
        yield f"  {row.name:44s} {time}  {counts}"
        if not row.identical:
            yield f"    {reason(row)}"
    if auto.auto_to_best is not None:
        yield f"  auto / {auto.best}: {auto.auto_to_best:.3f}"


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Per pattern: `auto` by the best other budget, and how often it switched."""
    found = {}
    for row in rows:
        if row.name == str(AUTO):
            least = TAIL_GAIN if row.pattern == TAIL else WITHIN
            found[row.pattern] = {
                "auto_to_best": row.auto_to_best,
                "best": row.best,
                "switches": row.switches,
                "is_met": None if row.auto_to_best is None else row.auto_to_best >= least,
                "is_steady": row.switches <= MOST_SWITCHES,
            }
    return found


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
    return Waves(name=name, lengths=tuple(lengths), arrives_after=tuple(arrives), **more)


def tail(sizes: Sequence[int], seed: int, num_short: int, num_long: int) -> list[int]:
    """Indices of problems for a long tail: the shortest and the longest ones by `sizes`, mixed."""
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], i))
    chosen = [*order[:num_short], *order[len(order) - num_long :]]
    random.Random(seed).shuffle(chosen)
    return chosen


def tail_ratio(lengths: Sequence[int]) -> float:
    """The 75th percentile of the lengths by the longest; below 0.2 is a long tail."""
    ordered = sorted(lengths)
    return ordered[(len(ordered) - 1) * 3 // 4] / ordered[-1]


bench_ramp = command(Ramp)
