"""Runs the rollout in both engines, round by round, and sums it up."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.engine_process import EngineProcess, EngineSpec, wait_until_quiet
from ..common.rows import Pair, Row, make_row
from ..policy.reward import problems, reward
from ..policy.tasks import Problem
from ..policy.tokenizer import prompt_text
from .explain import Explained, slowest
from .ideal import extend_sizes, ideal_rollout_speedup, row_times
from .plan import PROMPT_LEN, Plan, request_params

Report = Callable[[str, int], None]
Told = list[dict[str, Any]]
"""What our engine's worker wrote down in a round."""
NUM_FIXED_UNITS = 5
"""Progress units besides the rounds: two engine starts, two warm-ups, the step times."""
_WARM_UP_TOKENS = 16
_EXTEND_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer and what it earned."""

    problem: Problem
    # text without special tokens
    answer: str
    reward: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a rollout benchmark found."""

    row: Row
    # of the last round, in the order of requests; stock's answers, which are ours unless the row says otherwise
    samples: tuple[Sample, ...]
    # the timed round of median speed-up, for the picture
    pair: Pair
    # rows -> milliseconds of a stock step; None where there is no speed to tell
    stock_ms_by_rows: dict[str, float] | None
    # of that same round; empty unless asked for, or where there is no speed to tell
    explained: tuple[Explained, ...] = ()

    @property
    def mean_reward(self) -> float:
        return statistics.mean(sample.reward for sample in self.samples)


def roll_out(plan: Plan, model: Path, report: Report, *, kv_gib: int, is_verbose: bool) -> Outcome:
    """Stock and ours on the same problems; both engines are alive at once."""
    chosen = problems(plan.prompts, plan.seed)
    arguments = plan.engine_arguments(model)
    common = {"arguments": arguments, "kv_gib": kv_gib, "is_verbose": is_verbose}
    with ExitStack() as stack:
        engines = []
        for spec in (
            EngineSpec(name="stock", **common),
            EngineSpec(name="spec rollout", has_plugin=True, spec_rollout=plan.spec_rollout(), **common),
        ):
            report(f"starting the {spec.name} engine", 0)
            engines.append(stack.enter_context(EngineProcess(spec)))
            report("", 1)
        stock, ours = engines
        texts = [prompt_text(problem.prompt) for problem in chosen]
        encoded = [ids[:PROMPT_LEN] for ids in stock.ask("encode", texts=texts)]
        prompts = [ids for ids in encoded for _ in range(plan.samples)]
        _warm_up(plan, chosen, prompts, engines, report)
        rounds = [_round(number, plan, chosen, prompts, stock, ours, report) for number in range(plan.rounds)]
        pairs = [pair for pair, _ in rounds]
        times = _price_list(plan, pairs, prompts, stock, ours, report)
        row = _make_row(plan, pairs, times)
        samples = _samples(plan, chosen, pairs[-1], stock)
    if not row.identical:
        return Outcome(row=row, samples=samples, pair=_median_round(rounds)[0], stock_ms_by_rows=None)
    pair, told = _median_round(rounds)
    return Outcome(
        row=row,
        samples=samples,
        pair=pair,
        stock_ms_by_rows={str(rows): ms for rows, ms in times.items()},
        explained=tuple(slowest(pair.ours, told, chosen, plan.samples, plan.explain)),
    )


def _warm_up(
    plan: Plan, chosen: list[Problem], prompts: list[list[int]], engines: list[EngineProcess], report: Report
) -> None:
    """A few tokens of a full batch, so that kernels are set up before anything is timed."""
    for engine in engines:
        report(f"warming up the {engine.spec.name} engine", 0)
        params = request_params(plan, chosen, is_ours=engine.spec.spec_rollout is not None)[: plan.batch]
        short = [{**values, "max_tokens": min(_WARM_UP_TOKENS, plan.max_tokens)} for values in params]
        engine.generate(prompts[: plan.batch], short)
        report("", 1)


def _round(
    number: int,
    plan: Plan,
    chosen: list[Problem],
    prompts: list[list[int]],
    stock: EngineProcess,
    ours: EngineProcess,
    report: Report,
) -> tuple[Pair, Told]:
    """One run of each, in an order that changes from round to round, so that drift favours nobody."""
    told: Told = []
    order = (stock, ours) if number % 2 == 0 else (ours, stock)
    runs = {}
    for engine in order:
        report(f"round {number + 1} of {plan.rounds}: {engine.spec.name}", 0)
        wait_until_quiet([stock, ours], engine)
        is_explained = engine is ours and plan.explain > 0
        if is_explained:
            # a whole batch may end in the last step, and any of them be among the slowest
            engine.ask("rpc", method="spec_rollout_explain", keep=plan.explain + plan.batch)
        runs[engine] = engine.generate(prompts, request_params(plan, chosen, is_ours=engine is ours))
        if is_explained:
            told = engine.ask("rpc", method="spec_rollout_explained")
        report("", 1)
    return Pair(stock=runs[stock], ours=runs[ours]), told


def _price_list(
    plan: Plan, pairs: list[Pair], prompts: list[list[int]], stock: EngineProcess, ours: EngineProcess, report: Report
) -> dict[int, float]:
    """What stock needs for a step of so many rows, as far as our steps go."""
    report("stock's step times", 0)
    totals = pairs[-1].ours.totals
    assert totals is not None
    wait_until_quiet([stock, ours], stock)
    batch = min(plan.batch, plan.num_requests)
    block = stock.ask("block_size")
    extend_ms = stock.ask(
        "extend",
        prefixes=[_prefix(prompts, i, block) for i in range(batch)],
        num_tokens=extend_sizes(batch, totals),
        repeats=_EXTEND_REPEATS,
        seed=0,
    )
    report("", 1)
    return row_times([pair.stock for pair in pairs], batch, extend_ms)


def _make_row(plan: Plan, pairs: list[Pair], times: dict[int, float]) -> Row:
    """The row, with the ideal of a shrinking batch in the place of the constant batch's."""
    row = make_row(" + ".join(plan.drafters), plan.batch, plan.max_draft_tokens, pairs)
    last = pairs[-1]
    if row.speedup is None or last.ours.totals is None:
        return row
    ideal = ideal_rollout_speedup(last.stock, last.ours.totals, plan.batch, times)
    if ideal is None:
        return row
    return dataclasses.replace(row, ideal=ideal, efficiency=row.speedup / ideal)


def _prefix(prompts: list[list[int]], request: int, block: int) -> list[int]:
    """One whole KV cache block of context, different for every request."""
    unit = [request % 256 + 4, *prompts[request]]
    return (unit * (block // len(unit) + 1))[:block]


def _samples(plan: Plan, chosen: list[Problem], pair: Pair, stock: EngineProcess) -> tuple[Sample, ...]:
    texts = stock.ask("decode", token_ids=[list(ids) for ids in pair.stock.token_ids])
    owners = [problem for problem in chosen for _ in range(plan.samples)]
    return tuple(
        Sample(problem=problem, answer=text, reward=reward(problem, text), num_tokens=len(ids))
        for problem, text, ids in zip(owners, texts, pair.stock.token_ids, strict=True)
    )


def _median_round(rounds: list[tuple[Pair, Told]]) -> tuple[Pair, Told]:
    by_speedup = sorted(rounds, key=lambda one: one[0].stock.wall_s / one[0].ours.wall_s)
    return by_speedup[(len(by_speedup) - 1) // 2]
