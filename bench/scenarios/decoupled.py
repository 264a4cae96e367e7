"""`specrollout bench decoupled`: a model that drafts in the target's own steps, and beside them on cores of its own.

Each setting is measured and estimated. The estimates know times and match rates of other problems alone, so they say
how far a plan can be trusted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_specrollout.decoupled.rates import Exits, coupled_rate, plain_rate
from vllm_specrollout.decoupled.rehearsal import Match, Setting, rehearse
from vllm_specrollout.decoupled.times import AffineTime, fit_time
from vllm_specrollout.errors import ConfigError

from ..policy.reward import problems
from ..runner.engines import IN_ONE_PROCESS, PROMPT_LEN, STOCK, Engines, run_round, sampling
from ..runner.models import DRAFT, find_model, quarter_drafter
from ..runner.report import Found, number
from ..runner.rows import Pair, quartiles
from ..runner.runs import Run, WorkerTotals, first_difference
from ..runner.scenario import EngineScenario, Session, command, flag

COUPLED, DECOUPLED = "coupled", "decoupled"
QUARTER, SMALL = "quarter", "small"
PLAIN = "plain"
_OTHERS = 1  # added to the seed of the problems that times and match rates are taken from
_STEPS = 2000  # of a rehearsal


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to decode in one setting."""

    # tokens per second of a request, its quartiles over rounds; None where an output is not stock's
    tokens_per_s: float | None
    quartiles: tuple[float, float] | None
    estimated: float
    tokens_per_step: float

    @property
    def error(self) -> float | None:
        """Of the estimate, as a share of what was measured."""
        return None if self.tokens_per_s is None else self.estimated / self.tokens_per_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting."""

    drafter: str
    batch: int
    window: int
    identical: bool
    difference: str | None
    # plain, coupled and decoupled
    ways: Mapping[str, Way]
    # the fastest by estimate and by measurement, and how much slower the first is than the second
    planned: str
    fastest: str | None
    lost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What estimates are made of: measured with one drafter, on other problems."""

    # of the target: on all cores, and on those it keeps beside the drafter, which works meanwhile
    verify: AffineTime
    verify_beside: AffineTime
    # a pass of the drafter: between the target's, and on cores of its own; per row: a node that it looks at
    draft: AffineTime
    draft_beside: AffineTime
    # share of positions at which the target's token is among the first 1, 2, ... choices
    among: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Decoupled(EngineScenario):
    """Compare a model that drafts in the target's own steps with one that drafts beside them, on cores of its own."""

    bench: ClassVar[str] = "decoupled"

    size: str = flag("150M", "The policy's cost: that of a model of 30M, 150M or 400M.")
    drafters: tuple[str, ...] = flag(
        (QUARTER, SMALL), "A quarter of the target's cost, or as small as it is.", choices=(QUARTER, SMALL)
    )
    device: str = flag("cpu:1", "Cores that the drafter has to itself, as in `devices`.")
    batches: tuple[int, ...] = flag((1, 2), "Requests at once.", "--batch", within=(1, 64))
    windows: tuple[int, ...] = flag((2, 4, 8), "Tokens of a draft window.", "--window", within=(1, 16))
    fan_out: int = flag(2, "Choices that are drafted at each position.", within=(1, 8))
    requests: int = flag(6, "Requests of each run, at least one batch.", within=(1, 1000))
    max_tokens: int = flag(160, "Tokens after which an answer is cut.", within=(2, 1 << 16))
    rounds: int = flag(3, "Timed rounds; the medians are reported.", within=(1, 1000))

    def measure(self, session: Session) -> Found:
        folder, title = find_model(None, self.size, self.dtype, self.cache, session.display, is_policy=True)
        runs = len(self.drafters) * len(self.batches) * (len(self.windows) * (self.rounds + 2))
        report = session.display.steps(1 + 2 * len(self.drafters) + runs)
        shape = {"seqs": max(self.batches), "length": PROMPT_LEN + self.max_tokens, "width": 2 * PROMPT_LEN}
        rows: list[Row] = []
        facts: dict[str, Facts] = {}
        with self.make_engines(folder, report, environment=IN_ONE_PROCESS, **shape) as engines:
            engines.start(STOCK)
            for drafter in self.drafters:
                model = quarter_drafter(self.size, self.cache) if drafter == QUARTER else DRAFT
                bench = _Bench(self, engines, drafter, str(model))
                facts[drafter] = bench.learn()
                rows += bench.rows(facts[drafter])
        return Found(model=title, rows=rows, extra={"facts": {name: _plain(own) for name, own in facts.items()}})

    def show(self, found: Found, out: Console) -> None:
        out.print(
            f"{found.model}, {self.dtype}: tokens per second of a request, measured (and estimated)", markup=False
        )
        table = Table(
            "drafter", "batch", "window", PLAIN, COUPLED, DECOUPLED, "planned", "fastest", "lost", pad_edge=False
        )
        for row in found.rows:
            shown = [_shown(row.ways[name]) for name in (PLAIN, COUPLED, DECOUPLED)]
            ends = (row.planned, row.fastest or "-", number(row.lost, ""))
            table.add_row(row.drafter, str(row.batch), str(row.window), *shown, *ends)
        out.print(table)
        for row in found.rows:
            if row.difference is not None:
                out.print(f"{row.drafter}, batch {row.batch}, window {row.window}: {row.difference}", markup=False)


def _shown(way: Way) -> str:
    return "-" if way.tokens_per_s is None else f"{way.tokens_per_s:.1f} ({way.estimated:.1f}, {way.error:+.0%})"


@dataclass(slots=True)
class _Sums:
    """Runs of one arm with one batch: what its steps took in the mean."""

    batch: int
    ms: float
    nodes: float
    draft_ms: float

    @classmethod
    def of(cls, run: Run, batch: int) -> _Sums:
        """Without the steps that compute prompts, as far as the worker tells them apart."""
        totals = run.totals
        wall = statistics.fmean(run.step_ms())
        if totals is None:
            return cls(batch, wall, 0.0, 0.0)
        draft_ms = totals.draft_ms / totals.steps
        return cls(batch, wall - draft_ms, totals.drafted / totals.request_steps, draft_ms)


class _Bench:
    """One drafter."""

    def __init__(self, scenario: Decoupled, engines: Engines, drafter: str, model: str) -> None:
        self._scenario, self._engines, self._drafter = scenario, engines, drafter
        deepest = max(scenario.windows)
        given = {"method": "draft_model", "model": model, "num_speculative_tokens": deepest}
        own = {
            "drafters": [],
            "budget": "fixed",
            "max_draft_tokens": min(deepest * scenario.fan_out, 64),
            "max_depth": deepest,
            "queue_order": "arrival",
            "speculative_config": given,
        }
        engines.start(self._name(COUPLED), own)
        beside = {"window": deepest, "fan_out": scenario.fan_out}
        engines.start(
            self._name(DECOUPLED),
            {**own, "placement": "decoupled", "devices": [scenario.device], "decoupled": beside},
        )

    def _name(self, arm: str) -> str:
        return f"{self._drafter} {arm}"

    # --- measured ----------------------------------------------------------------------------------------------------

    def _pairs(self, batch: int, window: int, seed: int, rounds: Sequence[int]) -> dict[str, list[Pair]]:
        scenario, engines = self._scenario, self._engines
        chosen = problems(max(scenario.requests // batch, 1) * batch, seed)
        prompts = engines.encode(chosen)
        pairs: dict[str, list[Pair]] = {COUPLED: [], DECOUPLED: []}

        def run(arm: str | None) -> Run:
            params = [sampling(seed + i, scenario.max_tokens, None if arm is None else {}) for i in range(len(prompts))]
            name = STOCK if arm is None else self._name(arm)
            if arm is not None:
                limits = {"max_draft_tokens": min(window * scenario.fan_out, 64), "max_depth": window}
                engines[name].ask("rpc", method="spec_rollout_set_budget", name="fixed", **limits)
            if arm == DECOUPLED:
                engines.ask(name, "rpc", method="spec_rollout_streams", window=window)
            waves = [max(0, i // batch * batch) for i in range(len(prompts))]
            return engines.run(name, prompts, params, "generate_in_waves", arrives_after=waves)

        for round_ in rounds:
            engines.report(f"{self._drafter}, batch {batch}, window {window}", 0)
            for arm, pair in run_round(round_, (COUPLED, DECOUPLED), run).items():
                pairs[arm].append(pair)
            engines.report("", 1)
        return pairs

    def learn(self) -> Facts:
        """Times and match rates, of other problems."""
        scenario = self._scenario
        sums: dict[str, list[_Sums]] = {STOCK: [], COUPLED: [], DECOUPLED: []}
        depths: list[int] = []
        ranks = np.zeros(0)
        beats: list[list[float]] = []
        for batch in scenario.batches:
            for window in scenario.windows:
                pairs = self._pairs(batch, window, scenario.seed + _OTHERS, (0,))
                sums[STOCK].append(_Sums.of(pairs[COUPLED][0].stock, batch))
                for arm in (COUPLED, DECOUPLED):
                    sums[arm].append(_Sums.of(pairs[arm][0].ours, batch))
                depths.append(window)
                told = self._engines.ask(self._name(DECOUPLED), "rpc", method="spec_rollout_streams")
                ranks = np.asarray(told["ranks"], dtype=np.float64) + (ranks if len(ranks) else 0.0)
                beats += told["beats"]
        return Facts(
            verify=_line([*sums[STOCK], *sums[COUPLED]]),
            verify_beside=_line(sums[DECOUPLED]),
            draft=fit_time(
                [one.batch for one in sums[COUPLED]],
                [one.draft_ms / depth for one, depth in zip(sums[COUPLED], depths, strict=True)],
            ).time,
            draft_beside=_passes(beats),
            among=tuple((np.cumsum(ranks)[: scenario.fan_out] / ranks.sum()).tolist()),
        )

    # --- estimated ---------------------------------------------------------------------------------------------------

    def rows(self, facts: Facts) -> list[Row]:
        scenario = self._scenario
        return [self._row(facts, batch, window) for batch in scenario.batches for window in scenario.windows]

    def _row(self, facts: Facts, batch: int, window: int) -> Row:
        pairs = self._pairs(batch, window, self._scenario.seed, range(-1, self._scenario.rounds))
        differences = [first_difference(pair.stock, pair.ours) for own in pairs.values() for pair in own]
        found = next((one for one in differences if one is not None), None)
        estimated = self._estimates(facts, batch, window)
        timed = {arm: [pair for pair in own if pair.is_timed] for arm, own in pairs.items()}
        runs = {
            PLAIN: [pair.stock for pair in timed[COUPLED]],
            **{arm: [pair.ours for pair in own] for arm, own in timed.items()},
        }
        ways = {name: _way(own, batch, estimated[name], found is None) for name, own in runs.items()}
        planned = max(estimated, key=estimated.__getitem__)
        speeds = {name: way.tokens_per_s for name, way in ways.items() if way.tokens_per_s is not None}
        fastest = max(speeds, key=speeds.__getitem__, default=None)
        return Row(
            drafter=self._drafter,
            batch=batch,
            window=window,
            identical=found is None,
            difference=None if found is None else found.as_text(),
            ways=ways,
            planned=planned,
            fastest=fastest,
            lost=None if fastest is None else 1.0 - speeds[planned] / speeds[fastest],
        )

    def _estimates(self, facts: Facts, batch: int, window: int) -> dict[str, float]:
        """Tokens per second of a request."""
        fan_out, among = self._scenario.fan_out, facts.among
        first, any_ = among[0], among[-1]
        exits = Exits((any_ - first) / (1.0 - first) if first < 1.0 else 0.0, fan_out - 1)
        setting = Setting(
            verify_ms=lambda requests, rows: facts.verify_beside.ms(requests, rows / requests),
            draft_ms=lambda streams, rows: facts.draft_beside.ms(streams, rows / streams),
            match=Match(among=among),
            batch=batch,
            window=window,
            fan_out=fan_out,
            most_drafts=min(window * fan_out, 64),
        )
        beside = rehearse(setting, np.random.default_rng(self._scenario.seed), _STEPS)
        rates = {
            PLAIN: plain_rate(facts.verify, batch),
            COUPLED: coupled_rate(facts.draft, facts.verify, batch, window, first, exits),
            DECOUPLED: beside.rate,
        }
        return {name: 1e3 * rate for name, rate in rates.items()}


def _way(runs: Sequence[Run], batch: int, estimated: float, is_told: bool) -> Way:
    speeds = [run.num_tokens / run.wall_s / batch for run in runs]
    totals: WorkerTotals | None = runs[-1].totals
    return Way(
        tokens_per_s=statistics.median(speeds) if is_told else None,
        quartiles=quartiles(speeds) if is_told else None,
        estimated=estimated,
        tokens_per_step=1.0 if totals is None else runs[-1].num_tokens / totals.request_steps,
    )


def _line(sums: Sequence[_Sums]) -> AffineTime:
    """V(b, w) of steps in the mean."""
    return fit_time([one.batch for one in sums], [one.ms for one in sums], [one.nodes for one in sums]).time


def _passes(beats: Sequence[Sequence[float]]) -> AffineTime:
    """D of a process that said what it did, second by second.

    Raises:
        ConfigError: it said nothing.
    """
    known = [beat for beat in beats if beat[1] > 0]
    if not known:
        raise ConfigError("the drafter's process said nothing of its work", "run more tokens, with `--max-tokens`")
    ms, passes, streams, rows = np.asarray(known, dtype=np.float64).T
    return fit_time(np.maximum(streams / passes, 1.0), ms / passes, rows / np.maximum(streams, 1.0)).time


def _plain(facts: Facts) -> dict[str, Any]:
    lines = ("verify", "verify_beside", "draft", "draft_beside")
    own = {name: getattr(facts, name) for name in lines}
    shown = {name: [line.fixed_ms, line.per_request_ms, line.per_row_ms] for name, line in own.items()}
    return {"fixed, per request, per row ms": shown, "among": list(facts.among)}


bench_decoupled = command(Decoupled)
