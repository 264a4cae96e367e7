"""`specrollout bench decoupled`: a model that drafts in the target's own steps, and beside them on cores of its own.

Each setting is measured and estimated. The estimates know times and match rates of earlier answers to the same problems
alone, so they say how far a plan can be trusted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from vllm_specrollout.cluster.rates import AffineTime, coupled_rate, decoupled_rate
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import MOST_NODES

from ..policy import DRAFT
from ..policy.reward import problems
from ..runner.engines import IN_ONE_PROCESS, PROMPT_LEN, STOCK, Engines, run_round, sampling
from ..runner.fields import Row
from ..runner.models import find_model, quarter_drafter
from ..runner.report import Found, Table
from ..runner.results import DECOUPLED as COLUMNS
from ..runner.rows import Pair, Run, first_difference, quartiles
from ..runner.scenario import RoundsScenario, Session, command, flag

PLAIN, COUPLED, DECOUPLED = "plain", "coupled", "decoupled"
_ARMS = (COUPLED, DECOUPLED)
QUARTER, SMALL = "quarter", "small"
_EARLIER = 1000  # added to the seed, of answers that times and match rates are taken from
_EPOCHS = 4  # of earlier answers, for match rates


@dataclass(frozen=True, kw_only=True)
class Decoupled(RoundsScenario):
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

    def title(self, found: Found) -> str:
        return f"{found.model}, {self.dtype}: times plain decoding, measured (estimated, error)"

    def told(self, found: Found) -> Iterator[Table | str]:
        yield Table(found.rows, COLUMNS)
        for row in found.rows:
            if row.difference is not None:
                yield f"{row.drafter}, batch {row.batch}, window {row.window}: {row.difference}"


class _Bench:
    """One drafter."""

    def __init__(self, scenario: Decoupled, engines: Engines, drafter: str, model: str) -> None:
        self._scenario, self._engines, self._drafter = scenario, engines, drafter
        self._prompts = engines.encode(problems(scenario.requests, scenario.seed))
        # the seed of earlier answers to the same problems, as the last epoch's are in RL
        self._before = scenario.seed + _EARLIER
        deepest = max(scenario.windows)
        own = {
            "drafters": [],
            "budget": "fixed",
            "max_draft_tokens": most_drafts(deepest),
            "max_depth": deepest,
            "queue_order": "arrival",
            "speculative_config": {"method": "draft_model", "model": model, "num_speculative_tokens": deepest},
        }
        engines.start(self._name(COUPLED), own)
        streams: dict[str, Any] = {"window": deepest, "fan_out": scenario.fan_out}
        place = {"devices": [scenario.device], "decoupled": streams, "placement": DECOUPLED}
        engines.start(self._name(DECOUPLED), {**own, **place})

    def stop(self) -> None:
        """End the drafter's engines."""
        for arm in _ARMS:
            self._engines.stop(self._name(arm))

    def _name(self, arm: str) -> str:
        return f"{self._drafter} {arm}"

    def _earlier(self, batch: int, window: int, round_: int) -> tuple[dict[str, Pair], Any]:
        """A round over earlier answers, and what the drafter beside did in it."""
        # told since it was asked last
        self._engines.tell(self._name(DECOUPLED), "streams")
        with self._engines.doing(f"{self._drafter}, batch {batch}, window {window}, earlier answers"):
            pairs = run_round(round_, _ARMS, lambda arm: self._run(arm, batch, window, self._before))
        return pairs, self._engines.tell(self._name(DECOUPLED), "streams")

    def _run(self, arm: str | None, batch: int, window: int, seed: int) -> Run:
        """All requests, so many at once; None: stock."""
        name = STOCK if arm is None else self._name(arm)
        if arm is not None:
            limits = {"max_draft_tokens": most_drafts(window), "max_depth": window}
            self._engines.tell(name, "set_budget", name="fixed", **limits)
        if arm == DECOUPLED:
            self._engines.tell(name, "set_streams", window=window)
        # one comes when one has ended: a batch of the longest answers alone would say more of them than of the others
        arrivals = [max(0, i - batch + 1) for i in range(len(self._prompts))]
        params = self._params(seed, arm is not None)
        return self._engines.run(name, self._prompts, params, arrives_after=arrivals)

    def _params(self, seed: int, is_ours: bool) -> list[dict[str, Any]]:
        scenario, options = self._scenario, {} if is_ours else None
        return [sampling(seed + i, scenario.max_tokens, options) for i in range(scenario.requests)]

    def run(self) -> list[Row]:
        """Every setting. What it is estimated from comes in turns with what it is compared with, as the host drifts."""
        scenario, rows, match = self._scenario, [], self._match()
        for batch in scenario.batches:
            learned = Learned(match)

            def run(window: int, arm: str | None, number: int, batch: int = batch) -> Run:
                return self._run(arm, batch, window, scenario.seed)

            def after(window: int, number: int, batch: int = batch, learned: Learned = learned) -> None:
                learned.add(window, *self._earlier(batch, window, number))

            self._earlier(batch, scenario.windows[0], -1)
            found = self._engines.rounds(
                dict.fromkeys(scenario.windows, _ARMS), range(scenario.rounds), run, after=after
            )
            for window in scenario.windows:
                pairs = {arm: found[window, arm] for arm in _ARMS}
                rows.append(self._row(learned.facts(window), batch, window, pairs))
        return rows

    def _match(self) -> float:
        """How often the target's token is the model's first choice, in earlier answers."""
        engines, name = self._engines, self._name(COUPLED)
        with engines.doing(f"{self._drafter}: match rates"):
            engines.tell(name, "matches", start=True)
            for epoch in range(_EPOCHS):
                engines.run(name, self._prompts, self._params(self._before + epoch * _EARLIER, True))
            told = engines.tell(name, "matches", start=False)
        return float((np.asarray(told["ranks"], dtype=np.int32) == 0).mean())

    def _row(self, facts: Facts, batch: int, window: int, pairs: Mapping[str, list[Pair]]) -> Row:
        differences = [first_difference(pair.stock, pair.ours) for own in pairs.values() for pair in own]
        found = next((one for one in differences if one is not None), None)
        expected = estimated(facts, window)
        timed = {arm: [pair for pair in pairs[arm] if pair.is_timed] for arm in _ARMS}
        ways = {arm: measured(own, expected.get(arm), found is None) for arm, own in timed.items()}
        planned, told = max(expected, key=expected.__getitem__), {}
        if found is None:
            stock = [pair.stock.num_tokens / pair.stock.wall_s for pair in timed[COUPLED]]
            typical = statistics.median(stock)
            told = {"stock_tokens_per_s": typical, "stock_quartiles": quartiles([one / typical for one in stock])}
            speeds = {PLAIN: 1.0, **{arm: ways[arm]["speedup"] or 0.0 for arm in _ARMS}}
            told["fastest"] = max(speeds, key=speeds.__getitem__)
            told["lost"] = 1.0 - speeds[planned] / speeds[told["fastest"]]
        return Row(
            drafter=self._drafter,
            batch=batch,
            window=window,
            identical=found is None,
            difference=None if found is None else found.as_text(),
            ways=ways,
            planned=planned,
            facts=asdict(facts),
            **told,
        )


def measured(pairs: Sequence[Pair], estimated: float | None, is_told: bool) -> dict[str, Any]:
    """One way to draft in one setting: times plain decoding, its quartiles over rounds, and what was estimated."""
    speeds, last = [pair.stock.wall_s / pair.ours.wall_s for pair in pairs], pairs[-1].ours
    return {
        "speedup": statistics.median(speeds) if is_told else None,
        "quartiles": quartiles(speeds) if is_told else None,
        "estimated": estimated,
        "tokens_per_step": 1.0 if last.totals is None else last.num_tokens / last.totals.request_steps,
    }


# --- estimated: from times and match rates of earlier answers, pure ---------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What estimates are made of: of one drafter, batch and window, on earlier answers.

    Times are in plain steps of stock vLLM, taken in the same minute: the host's speed drifts by more than what is
    compared.
    """

    # [2] without drafts, and of each node of a request: of the target on all cores; and on those that it keeps beside
    # the drafter, which works meanwhile
    verify: tuple[float, float]
    verify_beside: tuple[float, float]
    # a pass of the drafter between the target's
    draft: float
    # one on cores of its own, with what it is asked for in it
    draft_beside: float
    # how often the target's token is the drafter's first choice
    match: float


Points = dict[int, list[tuple[float, float]]]
"""Window -> nodes, and what they took, of stock's step."""


class Learned:
    """What estimates are made of, as it comes in, run by run.

    How much a node adds is learned of all windows together. What a step takes without any is each window's own: it was
    measured in the same minutes, and steps do not grow evenly where more rows fill another tile of a matrix product.
    For steps beside a drafter, how many times longer they take is each window's own.
    """

    def __init__(self, match: float) -> None:
        self._match = match
        # nodes of a request in a run's steps
        self._steps: dict[str, Points] = {COUPLED: {}, DECOUPLED: {}}
        self._passes: dict[int, list[float]] = {}
        # milliseconds of a pass beside the target, of stock's step
        self._beats: dict[int, list[float]] = {}

    def add(self, window: int, pairs: Mapping[str, Pair], told: Mapping[str, Any]) -> None:
        plain_ms = statistics.fmean(pairs[COUPLED].stock.step_ms())
        for arm, pair in pairs.items():
            totals = pair.ours.totals
            assert totals is not None
            draft_ms = totals.draft_ms / totals.steps
            step_ms = statistics.fmean(pair.ours.step_ms()) - draft_ms
            points = self._steps[arm].setdefault(window, [])
            points.append((totals.drafted / totals.request_steps, step_ms / plain_ms))
            if arm == COUPLED:
                self._passes.setdefault(window, []).append(draft_ms / window / plain_ms)
        beats = [ms / passes / plain_ms for ms, passes, _ in told["beats"] if passes]
        if beats:
            self._beats.setdefault(window, []).extend(beats)

    def facts(self, window: int) -> Facts:
        """Raises: ConfigError: the runs were too short to tell."""
        if window not in self._beats:
            raise ConfigError("the drafter's process drafted next to nothing", "run more tokens, with `--max-tokens`")
        verify = line_through(self._steps[COUPLED], window, (0.0, 1.0))
        return Facts(
            verify=verify,
            verify_beside=slowed((1.0, verify[1]), self._steps[DECOUPLED][window]),
            draft=statistics.median(self._passes[window]),
            draft_beside=statistics.median(self._beats[window]),
            match=self._match,
        )


def estimated(facts: Facts, window: int) -> dict[str, float]:
    """Placement -> times plain decoding. First choices count; the choices beside them cost their rows alone.

    Times were measured at the batch, so they are those of a request and of all."""
    rows = most_drafts(window) / window
    here, beside = (AffineTime(0.0, line[0], line[1] * rows) for line in (facts.verify, facts.verify_beside))
    own, other = AffineTime(0.0, facts.draft), AffineTime(0.0, facts.draft_beside)
    return {
        PLAIN: 1.0,
        COUPLED: coupled_rate(own, here, 1, window, facts.match),
        DECOUPLED: decoupled_rate(other, beside, 1, window, facts.match),
    }


def most_drafts(window: int) -> int:
    """Nodes of a request that are verified, either way: a model's comb has two choices at each level."""
    return min(2 * window, MOST_NODES)


def slowed(line: tuple[float, float], points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """A line made so many times as steep and as high that it passes through the points' middle.

    Steps beside a drafter verify what has come, often about one node each. Points so close together tell no slope: in
    two settings one node seemed to take as long as a step, and estimates were twice what was measured. On fewer cores
    all parts of a step take longer, so one factor is learned, and the slope is that of steps on all cores.
    """
    times = statistics.median(time / (line[0] + line[1] * nodes) for nodes, time in points)
    return times * line[0], times * line[1]


def line_through(points: Points, window: int, *more: tuple[float, float]) -> tuple[float, float]:
    """Through a window's points, with the slope of all and some more.

    That is the median of the slopes between two of them (Theil and Sen), so a stall decides nothing. A node that seems
    to take less than nothing takes nothing.
    """
    nodes, times = np.asarray([*more, *(point for own in points.values() for point in own)], dtype=np.float64).T
    first, second = np.triu_indices(len(nodes), 1)
    apart = nodes[first] != nodes[second]
    slopes = (times[second] - times[first])[apart] / (nodes[second] - nodes[first])[apart]
    slope = max(float(np.median(slopes)), 0.0) if len(slopes) else 0.0
    return statistics.median(time - slope * count for count, time in points[window]), slope


bench_decoupled = command(Decoupled)
