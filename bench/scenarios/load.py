"""`specrollout bench ramp`: load that changes during the run, and how every budget takes it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rich.console import Console

from vllm_specrollout.config import BUDGETS, MAX_NODES

from ..policy.reward import problems
from ..runner.budgets import AUTO, Budget, BudgetEngines, ComparedRow, Waves, compared
from ..runner.engines import run_round
from ..runner.models import find_model
from ..runner.report import Found
from ..runner.rows import Pair, make_row
from ..runner.runs import Run
from ..runner.scenario import ModelScenario, Session, command, flag
from .patterns import PATTERNS, Pattern, pattern, tail, tail_ratio
from .rollout import DRAFTERS

PROMPT_LEN = 64
TAIL = "tail"
WITHIN = 0.95
"""`auto` may take 5 % longer than the best other budget."""
TAIL_GAIN = 1.15
"""What expected lengths are to be worth in a long-tail rollout, in drafts and in the queue's order together."""
MOST_SWITCHES = 2
NUM_SHORT, NUM_LONG = 36, 4
"""Answers of the long tail: many short ones, few long ones."""
_TAIL_TOKENS, _TOKENS = 1024, 96
_POOL = 400
_EPOCHS = 4
"""Passes over a tail's problems, with other noise, before anything is timed: what lengths are learned from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RampRow(ComparedRow):
    """A row of one pattern under one budget; `batch` is the most requests at once."""

    pattern: str
    # of the last round, as `spec_rollout_switches` counts them
    switches: int
    mind_changes: int
    steps_on: int
    steps_off: int
    # 75th percentile of the answers' lengths / the longest
    length_ratio: float
    # the fastest other budget; on the row of `auto` only
    best: str | None


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
        is_policy = self.is_tail and self.model is None
        folder, title = find_model(self.model, self.size, self.dtype, self.cache, session.display, is_policy=is_policy)
        length = (4 if self.is_tail else 1) * PROMPT_LEN + self.tokens + 1
        report = session.display.steps(len(self.loads()) + 2)
        shape = {"seqs": self.seqs, "length": length, "width": 4 * PROMPT_LEN}
        most, drafters = self.max_draft_tokens, list(DRAFTERS) if self.is_tail else ["oracle"]
        config = {"drafters": drafters, "max_draft_tokens": most, "max_depth": most}
        more = {"kind": BudgetEngines, "spec_rollout": config, "scratch": session.scratch}
        rows: list[RampRow] = []
        with self.make_engines(folder, report, **shape, **more) as engines:
            for name in self.loads():
                own = _Bench(self, engines, name).rows()
                _print_pattern(own, session.display.out)
                rows += own
                report("", 1)
        return Found(model=title, rows=rows, extra={"summary": summary(rows)})

    def show(self, found: Found, out: Console) -> None:
        """Each pattern was told when it was over."""


class _Bench:
    """One pattern under all budgets."""

    def __init__(self, scenario: Ramp, engines: BudgetEngines, name: str) -> None:
        self._scenario, self._engines = scenario, engines
        tokens = scenario.tokens or _TOKENS
        if name == TAIL:
            # many of few terms, few of many; answers grow with the square of the terms
            pool = problems(_POOL, seed=scenario.seed)
            chosen = [pool[i] for i in tail([one.size for one in pool], scenario.seed, NUM_SHORT, NUM_LONG)]
            self._prompts = engines.encode(chosen)
            self._load = Pattern(name=name, lengths=(tokens,) * len(chosen), arrives_after=(0,) * len(chosen))
        else:
            self._load = pattern(name, scenario.requests, tokens)
            self._prompts = engines.prompts(scenario.requests, PROMPT_LEN)[: len(self._load.lengths)]

    def rows(self) -> list[RampRow]:
        """Of all budgets."""
        scenario, engines, arms = self._scenario, self._engines, self._scenario.arms()
        self._run(None)
        recorded = self._run(None)
        if not scenario.is_tail:
            engines.set_answers(recorded, scenario.accuracy, self._load.turns_bad_at)
        pairs: dict[Budget, list[Pair]] = {arm: [] for arm in arms}
        switches: dict[Budget, dict[str, int]] = {}

        def run(arm: Budget | None) -> Run:
            if arm is None:
                return recorded if number < 0 else self._run(None)
            when = "warm-up" if number < 0 else f"round {number + 1} of {scenario.rounds}"
            engines.report(f"{self._load.name}: {when}, {arm.title}", 0)
            engines.set_budget(arm, is_fresh=number < 0)
            if scenario.is_tail and number < 0 and arm.longest_first:
                # earlier epochs: other answers to the same problems
                for epoch in range(1, _EPOCHS + 1):
                    self._run(arm, epoch)
            engines.switches()
            found = self._run(arm)
            switches[arm] = engines.switches()
            return found

        for number in range(-1, scenario.rounds):
            for arm, pair in run_round(number, arms, run).items():
                pairs[arm].append(pair)
        return self._sum_up(pairs, switches)

    def _waves(self, epoch: int = 0) -> Waves:
        return Waves(
            prompts=self._prompts,
            seed=self._scenario.seed + epoch * len(self._prompts),
            lengths=self._load.lengths,
            arrives_after=self._load.arrives_after,
            reload_after=self._load.reload_after,
            is_to_the_end=not self._scenario.is_tail,
        )

    def _run(self, arm: Budget | None, epoch: int = 0) -> Run:
        return self._engines.run_waves(arm, self._waves(epoch))

    def _sum_up(self, pairs: Mapping[Budget, list[Pair]], switches: Mapping[Budget, dict[str, int]]) -> list[RampRow]:
        batch = min(len(self._prompts), self._scenario.seqs)
        rows = {arm: make_row(arm.title, batch, 0, own) for arm, own in pairs.items()}
        timed = {arm: [pair.ours.wall_s for pair in own if pair.is_timed] for arm, own in pairs.items()}

        def fields(arm: Budget, best: Budget | None) -> dict[str, Any]:
            lengths = tail_ratio([len(ids) for ids in pairs[arm][-1].stock.token_ids])
            own = {"pattern": self._load.name, "seed": self._scenario.seed, "length_ratio": lengths}
            return {**switches[arm], **own, "best": best and best.title}

        rivals = [arm for arm in pairs if arm != AUTO]
        judged = {arm: self._engines.judge(self._waves(), own) for arm, own in pairs.items()}
        return compared(RampRow, rows, pairs, judged, lambda arm: statistics.median(timed[arm]), fields, rivals)


def _print_pattern(rows: Sequence[RampRow], out: Console) -> None:
    auto = rows[0]
    head = f"{auto.pattern}: {auto.num_requests} requests, {auto.batch} at once, seed {auto.seed}, "
    lines = [head + f"p75/max {auto.length_ratio:.2f}"]
    for row in rows:
        time = "not comparable" if row.speedup is None else f"{row.makespan_s:7.2f} s  {row.speedup:.2f}x stock"
        counts = f"on {row.steps_on}, off {row.steps_off} steps, {row.switches} switches ({row.mind_changes} by choice)"
        lines.append(f"  {row.name:44s} {time}  {counts}")
        if not row.identical:
            lines.append(f"    {row.reason}")
    if auto.auto_to_best is not None:
        lines.append(f"  auto / {auto.best}: {auto.auto_to_best:.3f}")
    for line in lines:
        out.print(line, markup=False, highlight=False)


def summary(rows: Sequence[RampRow]) -> dict[str, Any]:
    """Per pattern: `auto` by the best other budget, and how often it switched."""
    found = {}
    for row in rows:
        if row.name == AUTO.title:
            least = TAIL_GAIN if row.pattern == TAIL else WITHIN
            found[row.pattern] = {
                "auto_to_best": row.auto_to_best,
                "best": row.best,
                "switches": row.switches,
                "is_met": None if row.auto_to_best is None else row.auto_to_best >= least,
                "is_steady": row.switches <= MOST_SWITCHES,
            }
    return found


bench_ramp = command(Ramp)
