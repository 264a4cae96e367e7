"""`specrollout bench decoupled`: a model that drafts in the target's own steps, and beside them on cores of its own.

Each setting is measured and estimated. The estimates know times and match rates of other problems alone, so they say
how far a plan can be trusted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_specrollout.decoupled.rehearsal import Match, Setting, coupled_tokens, rehearse
from vllm_specrollout.errors import ConfigError

from ..policy.reward import problems
from ..runner.engines import IN_ONE_PROCESS, PROMPT_LEN, STOCK, Engines, run_round, sampling
from ..runner.models import DRAFT, find_model, quarter_drafter
from ..runner.report import Found, number
from ..runner.rows import Pair, quartiles
from ..runner.runs import Run, first_difference
from ..runner.scenario import EngineScenario, Session, command, flag

COUPLED, DECOUPLED = "coupled", "decoupled"
QUARTER, SMALL = "quarter", "small"
PLAIN = "plain"
_OTHERS = 1  # added to the seed of the problems that times and match rates are taken from
_STEPS = 2000  # of a rehearsal


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to draft in one setting."""

    # times plain decoding, and the quartiles over rounds; None where an output is not stock's
    speedup: float | None
    quartiles: tuple[float, float] | None
    estimated: float
    tokens_per_step: float

    @property
    def error(self) -> float | None:
        """Of the estimate, as a share of what was measured."""
        return None if self.speedup is None else self.estimated / self.speedup - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting."""

    drafter: str
    batch: int
    window: int
    identical: bool
    difference: str | None
    # of plain decoding, all requests together
    stock_tokens_per_s: float | None
    # coupled and decoupled
    ways: Mapping[str, Way]
    # the fastest by estimate and by measurement, and how much slower the first is than the second
    planned: str
    fastest: str | None
    lost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What estimates are made of: of one drafter and batch, on other problems. Times are in plain steps of stock vLLM,
    taken in the same minute: the host's speed drifts by more than what is compared."""

    # [2] without drafts, and of each node of a request: of the target on all cores; and on those that it keeps beside the
    # drafter, which works meanwhile
    verify: tuple[float, float]
    verify_beside: tuple[float, float]
    # a pass of the drafter between the target's
    draft: float
    # [2] one on cores of its own, and of each node that it looks at in a stream
    draft_beside: tuple[float, float]
    match: Match


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
        runs = len(self.drafters) * len(self.batches) * (1 + len(self.windows) * (1 + self.rounds))
        report = session.display.steps(1 + 2 * len(self.drafters) + runs)
        shape = {"seqs": max(self.batches), "length": PROMPT_LEN + self.max_tokens, "width": 2 * PROMPT_LEN}
        rows: list[Row] = []
        facts: dict[str, dict[int, Facts]] = {}
        with self.make_engines(folder, report, environment=IN_ONE_PROCESS, **shape) as engines:
            engines.start(STOCK)
            for drafter in self.drafters:
                model = quarter_drafter(self.size, self.cache) if drafter == QUARTER else DRAFT
                bench = _Bench(self, engines, drafter, str(model))
                facts[drafter], own = bench.run()
                rows += own
        told = {name: {batch: _plain(one) for batch, one in own.items()} for name, own in facts.items()}
        return Found(model=title, rows=rows, extra={"facts": told})

    def show(self, found: Found, out: Console) -> None:
        out.print(f"{found.model}, {self.dtype}: times plain decoding, measured (estimated, error)", markup=False)
        columns = ("drafter", "batch", "window", "stock tokens/s", COUPLED, DECOUPLED, "planned", "fastest", "lost")
        table = Table(*columns, pad_edge=False)
        for row in found.rows:
            shown = [_shown(row.ways[name]) for name in (COUPLED, DECOUPLED)]
            ends = (row.planned, row.fastest or "-", number(row.lost, ""))
            own = (row.drafter, str(row.batch), str(row.window), number(row.stock_tokens_per_s, ""))
            table.add_row(*own, *shown, *ends)
        out.print(table)
        for row in found.rows:
            if row.difference is not None:
                out.print(f"{row.drafter}, batch {row.batch}, window {row.window}: {row.difference}", markup=False)


def _shown(way: Way) -> str:
    return "-" if way.speedup is None else f"{way.speedup:.2f}x ({way.estimated:.2f}x, {way.error:+.0%})"


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

    def _round(self, batch: int, window: int, seed: int, round_: int) -> dict[str, Pair]:
        scenario, engines = self._scenario, self._engines
        chosen = problems(max(scenario.requests // batch, 1) * batch, seed)
        prompts = engines.encode(chosen)
        waves = [i // batch * batch for i in range(len(prompts))]

        def run(arm: str | None) -> Run:
            options: dict[str, Any] | None = None if arm is None else {}
            params = [sampling(seed + i, scenario.max_tokens, options) for i in range(len(prompts))]
            name = STOCK if arm is None else self._name(arm)
            if arm is not None:
                limits = {"max_draft_tokens": min(window * scenario.fan_out, 64), "max_depth": window}
                engines[name].ask("rpc", method="spec_rollout_set_budget", name="fixed", **limits)
            if arm == DECOUPLED:
                self._ask_streams(window=window)
            return engines.run(name, prompts, params, "generate_in_waves", arrives_after=waves)

        engines.report(f"{self._drafter}, batch {batch}, window {window}", 0)
        pairs = run_round(round_, (COUPLED, DECOUPLED), run)
        engines.report("", 1)
        return pairs

    def run(self) -> tuple[dict[int, Facts], list[Row]]:
        """Every setting: times and match rates on some problems, then speeds on others."""
        scenario, facts, rows = self._scenario, {}, []
        for batch in scenario.batches:
            learned = _Learned(batch)
            # the first is a warm-up
            for window in (scenario.windows[0], *scenario.windows):
                pairs = self._round(batch, window, scenario.seed + _OTHERS, 0)
                learned.add(window, pairs, self._ask_streams())
            facts[batch] = learned.facts()
            for window in scenario.windows:
                own: dict[str, list[Pair]] = {COUPLED: [], DECOUPLED: []}
                for round_ in range(scenario.rounds):
                    for arm, pair in self._round(batch, window, scenario.seed, round_).items():
                        own[arm].append(pair)
                rows.append(self._row(facts[batch], batch, window, own))
        return facts, rows

    def _ask_streams(self, **more: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._engines.ask(self._name(DECOUPLED), "rpc", method="spec_rollout_streams", **more)
        return answer

    # --- estimated ---------------------------------------------------------------------------------------------------

    def _row(self, facts: Facts, batch: int, window: int, pairs: Mapping[str, list[Pair]]) -> Row:
        differences = [first_difference(pair.stock, pair.ours) for own in pairs.values() for pair in own]
        found = next((one for one in differences if one is not None), None)
        estimated = self._estimates(facts, batch, window)
        timed = {arm: [pair for pair in own if pair.is_timed] for arm, own in pairs.items()}
        ways = {arm: _way(own, estimated[arm], found is None) for arm, own in timed.items()}
        planned = max(estimated, key=estimated.__getitem__)
        speeds = {PLAIN: 1.0} | {arm: way.speedup for arm, way in ways.items() if way.speedup is not None}
        fastest = max(speeds, key=speeds.__getitem__) if found is None else None
        stock = [pair.stock.num_tokens / pair.stock.wall_s for pair in timed[COUPLED]]
        return Row(
            drafter=self._drafter,
            batch=batch,
            window=window,
            identical=found is None,
            difference=None if found is None else found.as_text(),
            stock_tokens_per_s=statistics.median(stock) if found is None else None,
            ways=ways,
            planned=planned,
            fastest=fastest,
            lost=None if fastest is None else 1.0 - speeds[planned] / speeds[fastest],
        )

    def _estimates(self, facts: Facts, batch: int, window: int) -> dict[str, float]:
        """Times plain decoding."""
        fan_out = self._scenario.fan_out
        setting = Setting(
            verify_ms=lambda requests, rows: _at(facts.verify_beside, rows / requests),
            draft_ms=lambda streams, rows: _at(facts.draft_beside, rows / streams),
            match=facts.match,
            batch=batch,
            window=window,
            fan_out=fan_out,
            most_drafts=min(window * fan_out, 64),
            most_depth=window,
        )
        beside = rehearse(setting, np.random.default_rng(self._scenario.seed), _STEPS)
        # a model's comb has two choices at each level
        steps = window * facts.draft + _at(facts.verify, 2 * window)
        return {PLAIN: 1.0, COUPLED: coupled_tokens(facts.match, window, 2) / steps, DECOUPLED: beside.rate}


def _at(line: tuple[float, float], nodes: float) -> float:
    return line[0] + line[1] * nodes


class _Learned:
    """What estimates are made of, as it comes in, run by run."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        # arm -> [runs] nodes of a request, and what a step took, of stock's
        self._steps: dict[str, list[tuple[float, float]]] = {COUPLED: [(0.0, 1.0)], DECOUPLED: []}
        self._passes: list[float] = []
        self._ranks: list[int] = []
        # nodes of a stream, and what a pass took, of stock's steps
        self._beats: list[tuple[float, float]] = []

    def add(self, window: int, pairs: Mapping[str, Pair], told: Mapping[str, Any]) -> None:
        plain_ms = statistics.fmean(pairs[COUPLED].stock.step_ms())
        for arm, pair in pairs.items():
            totals = pair.ours.totals
            assert totals is not None
            draft_ms = totals.draft_ms / totals.steps
            step_ms = statistics.fmean(pair.ours.step_ms()) - draft_ms
            self._steps[arm].append((totals.drafted / totals.request_steps, step_ms / plain_ms))
            if arm == COUPLED:
                self._passes.append(draft_ms / window / plain_ms)
        self._ranks += told["ranks"]
        known = [beat for beat in told["beats"] if beat[1] > 0]
        self._beats += [(rows / streams, ms / passes / plain_ms) for ms, passes, streams, rows in known]

    def facts(self) -> Facts:
        """Raises: ConfigError: the runs were too short to tell."""
        if not self._ranks or not self._beats:
            raise ConfigError("the drafter's process drafted next to nothing", "run more tokens, with `--max-tokens`")
        return Facts(
            verify=_line(self._steps[COUPLED]),
            verify_beside=_line(self._steps[DECOUPLED]),
            draft=statistics.median(self._passes),
            draft_beside=_line(self._beats),
            match=Match(np.asarray(self._ranks, dtype=np.int32)),
        )


def _way(pairs: Sequence[Pair], estimated: float, is_told: bool) -> Way:
    speeds = [pair.stock.wall_s / pair.ours.wall_s for pair in pairs]
    last = pairs[-1].ours
    return Way(
        speedup=statistics.median(speeds) if is_told else None,
        quartiles=quartiles(speeds) if is_told else None,
        estimated=estimated,
        tokens_per_step=1.0 if last.totals is None else last.num_tokens / last.totals.request_steps,
    )


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Through (nodes, time), by least squares; a node that seems to take less than nothing takes nothing."""
    nodes, times = np.asarray(points, dtype=np.float64).T
    spread = float(((nodes - nodes.mean()) ** 2).sum())
    slope = float(((nodes - nodes.mean()) * (times - times.mean())).sum()) / spread if spread else 0.0
    slope = max(slope, 0.0)
    return float(times.mean() - slope * nodes.mean()), slope


def _plain(facts: Facts) -> dict[str, Any]:
    shares = [facts.match.among(count) for count in (1, 2, 3)]
    return {**asdict(facts), "match": {"positions": len(facts.match.ranks), "among": shares}}


bench_decoupled = command(Decoupled)
