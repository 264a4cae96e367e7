"""`specrollout bench decoupled`: a model that drafts in the target's own steps, and beside them on cores of its own.

Each setting is measured and estimated. The estimates know times and match rates of earlier answers to the same problems
alone, so they say how far a plan can be trusted.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
from rich.console import Console

from vllm_specrollout.cluster.rehearsal import Match

from ..policy import DRAFT
from ..policy.reward import problems
from ..runner.engines import IN_ONE_PROCESS, PROMPT_LEN, STOCK, Engines, run_round, sampling
from ..runner.models import find_model, quarter_drafter
from ..runner.report import Found, print_table
from ..runner.rows import Pair, quartiles
from ..runner.runs import Run, first_difference
from ..runner.scenario import EngineScenario, Session, command, flag
from ..runner.tables import decoupled_columns
from .estimates import COUPLED, DECOUPLED, PLAIN, Facts, Learned, estimated, most_drafts

AUTO = "auto"
RECONFIGURED = "reconfigured"
QUARTER, SMALL = "quarter", "small"
_EARLIER = 1000  # added to the seed, of answers that times and match rates are taken from
_EPOCHS = 4  # of earlier answers, for match rates
_MOST_TOKENS = 1280  # of each request, in which `auto` may settle


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to draft in one setting."""

    # times plain decoding, and the quartiles over rounds; None where an output is not stock's
    speedup: float | None
    quartiles: tuple[float, float] | None
    # None: the planner does not know this way
    estimated: float | None
    tokens_per_step: float


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
    # stock's speed in a round over its median, lower and upper: what is smaller is no finding
    stock_quartiles: tuple[float, float] | None
    # coupled, decoupled, and reconfigured where that was asked for
    ways: Mapping[str, Way]
    # the fastest by estimate and by measurement, and how much slower the first is than the second
    planned: str
    fastest: str | None
    lost: float | None
    # the placement that `auto` found to be faster, and by how much the other one is faster after all; None: not settled
    chosen: str | None
    chosen_lost: float | None
    # what the estimates were made of, see `Facts`
    facts: Mapping[str, Any] = field(default_factory=dict)


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
    fan_out: int = flag(4, "Choices that a decoupled drafter sends for each position.", within=(1, 8))
    requests: int = flag(6, "Requests of each run, at least one batch.", within=(1, 1000))
    max_tokens: int = flag(160, "Tokens after which an answer is cut.", within=(2, 1 << 16))
    rounds: int = flag(3, "Timed rounds; the medians are reported.", within=(1, 1000))
    reconfigure: bool = flag(False, "Measure windows of requests' own beside, as `reconfigure` of `decoupled`.")

    def measure(self, session: Session) -> Found:
        folder, title = find_model(None, self.size, self.dtype, self.cache, session.display, is_policy=True)
        runs = len(self.drafters) * len(self.batches) * (1 + 2 * len(self.windows) * self.rounds)
        report = session.display.steps(1 + 4 * len(self.drafters) + runs)
        shape = {"seqs": max(self.batches), "length": PROMPT_LEN + self.max_tokens, "width": 2 * PROMPT_LEN}
        rows: list[Row] = []
        with self.make_engines(folder, report, environment=IN_ONE_PROCESS, **shape) as engines:
            engines.start(STOCK)
            for drafter in self.drafters:
                model = quarter_drafter(self.size, self.cache) if drafter == QUARTER else DRAFT
                bench = _Bench(self, engines, drafter, str(model))
                rows += bench.run()
                # those of all drafters, and the drafters' processes, are too many for 24 GB
                bench.stop()
        return Found(model=title, rows=rows)

    def show(self, found: Found, out: Console) -> None:
        out.print(f"{found.model}, {self.dtype}: times plain decoding, measured (estimated, error)", markup=False)
        rows = [asdict(row) for row in found.rows]
        print_table(rows, decoupled_columns(rows), out)
        for row in found.rows:
            if row.difference is not None:
                out.print(f"{row.drafter}, batch {row.batch}, window {row.window}: {row.difference}", markup=False)


class _Bench:
    """One drafter."""

    def __init__(self, scenario: Decoupled, engines: Engines, drafter: str, model: str) -> None:
        self._scenario, self._engines, self._drafter = scenario, engines, drafter
        deepest = max(scenario.windows)
        given = {"method": "draft_model", "model": model, "num_speculative_tokens": deepest}
        own = {
            "drafters": [],
            "budget": "fixed",
            "max_draft_tokens": most_drafts(deepest),
            "max_depth": deepest,
            "queue_order": "arrival",
            "speculative_config": given,
        }
        engines.start(self._name(COUPLED), own)
        streams: dict[str, Any] = {"window": deepest, "fan_out": scenario.fan_out}
        place = {"devices": [scenario.device], "decoupled": streams}
        for arm in (DECOUPLED, AUTO):
            # the same engine with and without: a host drifts less between runs than between engines
            if scenario.reconfigure and arm == DECOUPLED:
                streams["reconfigure"] = "goodput"
            engines.start(self._name(arm), {**own, **place, "placement": arm})
            streams.pop("reconfigure", None)

    def stop(self) -> None:
        """End the drafter's engines."""
        for arm in (COUPLED, DECOUPLED, AUTO):
            self._engines.stop(self._name(arm))

    def _name(self, arm: str) -> str:
        return f"{self._drafter} {DECOUPLED if arm == RECONFIGURED else arm}"

    # --- measured ----------------------------------------------------------------------------------------------------

    @property
    def _arms(self) -> tuple[str, ...]:
        return (COUPLED, DECOUPLED, RECONFIGURED) if self._scenario.reconfigure else (COUPLED, DECOUPLED)

    def _round(
        self, batch: int, window: int, seed: int, round_: int, arms: Sequence[str] = (COUPLED, DECOUPLED)
    ) -> dict[str, Pair]:
        self._engines.report(f"{self._drafter}, batch {batch}, window {window}", 0)
        pairs = run_round(round_, arms, lambda arm: self._run(arm, batch, window, seed))
        self._engines.report("", 1)
        return pairs

    def _run(self, arm: str | None, batch: int, window: int, seed: int) -> Run:
        """All requests, so many at once; None: stock."""
        engines = self._engines
        prompts = self._prompts()
        name = STOCK if arm is None else self._name(arm)
        if arm is not None:
            limits = {"max_draft_tokens": most_drafts(window), "max_depth": window}
            engines[name].ask("rpc", method="spec_rollout_set_budget", name="fixed", **limits)
        if arm in (DECOUPLED, RECONFIGURED, AUTO):
            streams: dict[str, Any] = {"window": window}
            if self._scenario.reconfigure and arm != AUTO:
                streams["reconfigures"] = arm == RECONFIGURED
            engines.ask(name, "rpc", method="spec_rollout_set_streams", **streams)
        # one comes when one has ended: a batch of the longest answers alone would say more of them than of the others
        arrivals = [max(0, i - batch + 1) for i in range(len(prompts))]
        params = self._params(seed, arm is not None)
        return engines.run(name, prompts, params, "generate_in_waves", arrives_after=arrivals)

    def run(self) -> list[Row]:
        """Every setting. What it is estimated from comes in turns with what it is compared with, as the host drifts."""
        scenario, rows = self._scenario, []
        match = self._match()
        for batch in scenario.batches:
            learned = Learned(match)
            found: dict[int, dict[str, list[Pair]]] = {w: {arm: [] for arm in self._arms} for w in scenario.windows}
            self._round(batch, scenario.windows[0], scenario.seed, -1)
            for round_ in range(scenario.rounds):
                for window, own in found.items():
                    self._ask_streams()
                    learned.add(window, self._round(batch, window, self._before, round_), self._ask_streams())
                    for arm, pair in self._round(batch, window, scenario.seed, round_, self._arms).items():
                        own[arm].append(pair)
            for window, own in found.items():
                chosen, own[AUTO] = self._settled(batch, window)
                rows.append(self._row(learned.facts(window), batch, window, own, chosen))
        return rows

    def _settled(self, batch: int, window: int) -> tuple[str | None, list[Pair]]:
        """What `auto` finds, given some time; None: it is not sure."""
        pairs, found = [], None
        ask = functools.partial(self._engines[self._name(AUTO)].ask, "rpc", method="spec_rollout_placing")
        ask(start_over=True)
        stock = self._run(None, batch, window, self._before)
        for _ in range(-(-_MOST_TOKENS // self._scenario.max_tokens)):
            pairs.append(Pair(stock=stock, ours=self._run(AUTO, batch, window, self._before)))
            # of whole batches: the last answers of a run are alone
            if (found := ask(batch=batch)) is not None:
                break
        return None if found is None else (COUPLED, DECOUPLED)[found], pairs

    def _match(self) -> Match:
        """Which choices the target's tokens are, of earlier answers."""
        engines, name = self._engines, self._name(COUPLED)
        engines.report(f"{self._drafter}: match rates", 0)
        engines.ask(name, "rpc", method="spec_rollout_matches", start=True)
        for epoch in range(_EPOCHS):
            engines.run(name, self._prompts(), self._params(self._before + epoch * _EARLIER, True))
        told = engines.ask(name, "rpc", method="spec_rollout_matches", start=False)
        engines.report("", 1)
        return Match(np.asarray(told["ranks"], dtype=np.int32))

    @property
    def _before(self) -> int:
        """The seed of earlier answers to the same problems, as the last epoch's are in RL."""
        return self._scenario.seed + _EARLIER

    def _prompts(self) -> list[list[int]]:
        return self._engines.encode(problems(self._scenario.requests, self._scenario.seed))

    def _params(self, seed: int, is_ours: bool) -> list[dict[str, Any]]:
        scenario = self._scenario
        options: dict[str, Any] | None = {} if is_ours else None
        return [sampling(seed + i, scenario.max_tokens, options) for i in range(scenario.requests)]

    def _ask_streams(self) -> dict[str, Any]:
        """What the drafter's process did since it was asked last."""
        answer: dict[str, Any] = self._engines.ask(self._name(DECOUPLED), "rpc", method="spec_rollout_streams")
        return answer

    # --- estimated ---------------------------------------------------------------------------------------------------

    def _row(self, facts: Facts, batch: int, window: int, pairs: Mapping[str, list[Pair]], chosen: str | None) -> Row:
        differences = [first_difference(pair.stock, pair.ours) for own in pairs.values() for pair in own]
        found = next((one for one in differences if one is not None), None)
        expected = estimated(facts, batch, window, self._scenario.fan_out, self._scenario.seed)
        timed = {arm: [pair for pair in pairs[arm] if pair.is_timed] for arm in self._arms}
        ways = {arm: measured(own, expected.get(arm), found is None) for arm, own in timed.items()}
        planned = max(expected, key=expected.__getitem__)
        planned_for = [(arm, ways[arm].speedup) for arm in (COUPLED, DECOUPLED)]
        speeds = {PLAIN: 1.0} | {arm: speed for arm, speed in planned_for if speed is not None}
        fastest = max(speeds, key=speeds.__getitem__) if found is None else None
        stock = [pair.stock.num_tokens / pair.stock.wall_s for pair in timed[COUPLED]]
        typical = statistics.median(stock)
        return Row(
            drafter=self._drafter,
            batch=batch,
            window=window,
            identical=found is None,
            difference=None if found is None else found.as_text(),
            stock_tokens_per_s=typical if found is None else None,
            stock_quartiles=quartiles([one / typical for one in stock]) if found is None else None,
            ways=ways,
            planned=planned,
            fastest=fastest,
            lost=None if fastest is None else 1.0 - speeds[planned] / speeds[fastest],
            chosen=chosen,
            chosen_lost=None
            if fastest is None or chosen is None
            else 1.0 - speeds[chosen] / max(speeds[COUPLED], speeds[DECOUPLED]),
            facts=facts.as_dict(),
        )


def measured(pairs: Sequence[Pair], estimated: float | None, is_told: bool) -> Way:
    speeds = [pair.stock.wall_s / pair.ours.wall_s for pair in pairs]
    last = pairs[-1].ours
    return Way(
        speedup=statistics.median(speeds) if is_told else None,
        quartiles=quartiles(speeds) if is_told else None,
        estimated=estimated,
        tokens_per_step=1.0 if last.totals is None else last.num_tokens / last.totals.request_steps,
    )


bench_decoupled = command(Decoupled)
