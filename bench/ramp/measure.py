"""Runs every pattern under stock and all budgets, interleaved, in one pair of engines."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ..common.rows import Pair, make_row
from ..common.runs import Run
from ..common.tuned import AUTO, SEED_STEP, SEEDS, Budget, Engines
from ..policy.reward import problems
from ..policy.tokenizer import prompt_text
from .plan import PROMPT_LEN, Pattern, Plan, RampRow, pattern, tail, tail_ratio

Report = Callable[[str, int], None]
NUM_SHORT, NUM_LONG = 36, 4
"""Answers of the long tail: many short ones, few long ones."""
_POOL = 400
_EPOCHS = 4
"""Passes over a tail's problems, with other noise, before anything is timed: what lengths are learned from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of a pattern, ready to run."""

    pattern: Pattern
    prompts: list[list[int]]
    is_real: bool = False

    def params(self, seed: int, *, is_ours: bool) -> list[dict[str, Any]]:
        values: list[dict[str, Any]] = []
        for i, length in enumerate(self.pattern.lengths):
            one = {"temperature": 1.0, "seed": seed + i, "max_tokens": length, "ignore_eos": not self.is_real}
            if is_ours:
                one["extra_args"] = {"spec_rollout": {"problem_id": str(i)}}
            values.append(one)
        return values


def run_ramps(plan: Plan, engines: Engines, report: Report, on_load: Callable[[list[RampRow]], None]) -> list[RampRow]:
    """All patterns; `on_load` hears of each one's rows."""
    rows: list[RampRow] = []
    for load in [tail_load(plan, engines)] if plan.is_tail else synthetic_loads(plan, engines):
        own: list[RampRow] = []
        # a seed whose outputs differ met a tie of stock's own: see docs/concepts/exactness.md
        for number in range(SEEDS):
            own = _rows(plan, engines, load, plan.seed + number * SEED_STEP, report)
            if all(row.is_comparable for row in own):
                break
        on_load(own)
        rows += own
        report("", 1)
    return rows


def synthetic_loads(plan: Plan, engines: Engines) -> list[Load]:
    texts = [prompt_text(problem.prompt) for problem in problems(plan.requests, seed=0)]
    encoded = [ids[:PROMPT_LEN] for ids in engines.stock.ask("encode", texts=texts)]
    loads = []
    for name in plan.patterns:
        made = pattern(name, plan.requests, plan.tokens)
        loads.append(Load(pattern=made, prompts=encoded[: len(made.lengths)]))
    return loads


def tail_load(plan: Plan, engines: Engines) -> Load:
    """The real policy's problems: many of few terms, few of many; answers grow with the square of the terms."""
    pool = problems(_POOL, seed=plan.seed)
    chosen = [pool[i] for i in tail([one.size for one in pool], plan.seed, NUM_SHORT, NUM_LONG)]
    prompts = engines.stock.ask("encode", texts=[prompt_text(problem.prompt) for problem in chosen])
    made = Pattern(name="tail", lengths=(plan.tokens,) * len(chosen), arrives_after=(0,) * len(chosen))
    return Load(pattern=made, prompts=prompts, is_real=True)


def _rows(plan: Plan, engines: Engines, load: Load, seed: int, report: Report) -> list[RampRow]:
    recorded = _run(engines, load, seed, is_ours=False)
    if not load.is_real:
        engines.set_answers(recorded, plan.accuracy, load.pattern.turns_bad_at)
    pairs: dict[Budget, list[Pair]] = {arm: [] for arm in plan.arms()}
    switches: dict[Budget, dict[str, int]] = {}
    for number in range(-1, plan.rounds):
        when = "warm-up" if number < 0 else f"round {number + 1} of {plan.rounds}"
        stock = recorded if number < 0 else _run(engines, load, seed, is_ours=False)
        arms = plan.arms() if number % 2 == 0 else plan.arms()[::-1]
        for arm in arms:
            report(f"{load.pattern.name}: {when}, {arm.title}", 0)
            engines.set_budget(arm, is_fresh=number < 0)
            if load.is_real and number < 0 and arm.length_weight:
                _learn_lengths(engines, load, seed)
            engines.switches()
            ours = _run(engines, load, seed, is_ours=True)
            switches[arm] = engines.switches()
            pairs[arm].append(Pair(stock=stock, ours=ours, is_timed=number >= 0))
    return _sum_up(plan, load, seed, pairs, switches)


def _learn_lengths(engines: Engines, load: Load, seed: int) -> None:
    """Earlier epochs: other answers to the same problems."""
    for epoch in range(1, _EPOCHS + 1):
        _run(engines, load, seed + epoch * len(load.prompts), is_ours=True)


def _run(engines: Engines, load: Load, seed: int, *, is_ours: bool) -> Run:
    engine = engines.ours if is_ours else engines.stock
    made = load.pattern
    params = load.params(seed, is_ours=is_ours)
    return engines.run(engine, load.prompts, params, list(made.arrives_after), made.reload_after)


def _sum_up(
    plan: Plan, load: Load, seed: int, pairs: dict[Budget, list[Pair]], switches: dict[Budget, dict[str, int]]
) -> list[RampRow]:
    batch = plan.places if plan.is_tail else plan.requests
    rows = {arm: make_row(arm.title, min(len(load.prompts), batch), 0, own) for arm, own in pairs.items()}
    is_comparable = all(row.identical for row in rows.values())
    others = [arm for arm in pairs if arm != AUTO]
    if plan.is_tail:
        # what all of the length weight is worth, not a part of it
        others = others[-1:]
    best = min(others, key=lambda arm: _wall_s(pairs[arm]), default=None)
    found = []
    for arm, row in rows.items():
        values = {field.name: getattr(row, field.name) for field in fields(row)}
        if not is_comparable:
            values |= {"speedup": None, "makespan_s": None, "stock_makespan_s": None, "rounds_s": None}
        is_told = is_comparable and arm == AUTO and best is not None
        found.append(
            RampRow(
                **values,
                **switches[arm],
                pattern=load.pattern.name,
                seed=seed,
                is_comparable=is_comparable,
                length_ratio=tail_ratio([len(ids) for ids in pairs[arm][-1].stock.token_ids]),
                auto_to_best=_ratio(pairs[best], pairs[AUTO]) if is_told and best is not None else None,
                best=best.title if is_told and best is not None else None,
            )
        )
    return found


def _wall_s(pairs: list[Pair]) -> float:
    return statistics.median(pair.ours.wall_s for pair in pairs if pair.is_timed)


def _ratio(ours: list[Pair], than: list[Pair]) -> float:
    timed = [[pair.ours.wall_s for pair in own if pair.is_timed] for own in (ours, than)]
    return statistics.median(one / other for one, other in zip(*timed, strict=True))
