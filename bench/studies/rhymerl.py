"""RhymeRL: Table 2, how well last epoch's lengths rank this epoch's answers; and section 7.2's ablation.

Ranks, their order, the two tiers and the outliers are those of `histopipe.py`. A trainer is one step off: a
worker begins a step once it has ended its last one and the step before that is learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from statistics import NormalDist

import numpy as np
from vllm_specrollout.bench.studies import histopipe
from vllm_specrollout.bench.studies.formulas import Floats, Ints, StepLine, drain_ms
from vllm_specrollout.bench.studies.report import Cell, Inputs, Number, ResultTable, Share, StudyReport, error_of

TABLE_2 = {
    ("first", 8): (85.7, 12.2, 0.61, 1.49),
    ("first", 16): (79.7, 16.8, 1.03, 2.47),
    ("second", 8): (83.2, 12.7, 0.55, 3.55),
    ("second", 16): (76.9, 17.5, 1.02, 4.58),
    ("third", 8): (79.0, 16.9, 0.86, 3.24),
    ("third", 16): (71.6, 22.8, 1.47, 4.13),
}
"""Data set and ranks -> percentages, as `ROWS` has them, which add up to 100. Of other data sets one row is printed."""
ROWS = ("accurate", "not in the last 10 %", "within beta", "migrated")
ABLATION = {"HistoPipe": 1.43, "two tiers": 1.10, "HistoSpec": 1.50}
"""Section 7.2.1, Math-14B: each over the arm before."""


class RhymeRLInputs(Inputs):
    """Math-14B on 128 GPUs, answers of up to 16K tokens."""

    # text
    longest: Number = 16384
    samples: Number = 16
    ranks: Number = 16
    problems: Number = 8192
    # free, set: 96 of 128 GPUs roll out with TP 2 (text); prompts of a step
    workers: Number = 48
    prompts: Number = 512
    # free, fitted: own spread over the problems' by data set, to the accuracy with 8 ranks
    own_spread: tuple[Number, Number, Number] = (0.159, 0.192, 0.258)
    # free, fitted to section 3: the first worker to end idles for 76 % of a step, all of them for 46 % in the mean
    median_length: Number = 1600
    length_spread: Number = 0.95
    # free, set: 14 GB of weights a GPU at 3.35 TB/s, and a millisecond; 3,000 tokens of KV cache; rows over 295
    base_ms: Number = 5.2
    request_ms: Number = 0.073
    row_ms: Number = 0.017
    knee_rows: Number = 256
    prefill_ms: Number = 0.03
    # derived from rollout's 91 % (section 3.1) and the 32 GPUs left to train: its time over a plain step of rollout
    train_share: Share = 0.3
    # free, fitted to 72 % of drafts accepted (text: 65 to 79 %, Figure 17): tokens of a run that the history has whole.
    # 93 % of tokens are in some run (section 5.1), which allows 13.3 at most. The spread of the logarithm is set
    run_length: Number = 7.8
    run_spread: Number = 1.0
    # free, set: steps of each arm
    steps: Number = 24


def epochs(inputs: RhymeRLInputs, own_spread: float, rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
    """[P, samples] lengths in two epochs that follow each other; problems share a part, own_spread says how much."""
    whole = float(np.hypot(1.0, own_spread))
    of_problem = rng.standard_normal((count, 1))

    def one() -> Floats:
        size = (of_problem + own_spread * rng.standard_normal((count, int(inputs.samples)))) / whole
        return np.clip(inputs.median_length * np.exp(inputs.length_spread * size), 1.0, inputs.longest)

    return one(), one()


def medians(lengths: Floats) -> dict[str, float]:
    """Problem (its number) -> what HistoPipe forecasts by, in its next epoch."""
    return {str(i): length for i, length in enumerate(np.median(lengths, axis=1).tolist())}


def ranked(inputs: RhymeRLInputs, own_spread: float, count: int, seed: int) -> tuple[float, float, float, float]:
    """A column of Table 2, in percent."""
    before, now = epochs(inputs, own_spread, np.random.default_rng(seed), int(inputs.problems))
    past = medians(before)
    groups = histopipe.ranks(past, count)
    # answers that are as long as those of a rank by their real order
    bounds = np.quantile(now, np.arange(1, count) / count)
    beta = histopipe.growth(past, medians(now))
    shares = np.zeros(4)
    for number, group in enumerate(groups):
        own = np.sort(now[[int(problem) for problem in group]].ravel())
        wrong = np.searchsorted(bounds, own, side="right") > number
        last = np.arange(len(own)) >= (1.0 - histopipe.LAST) * len(own)
        beyond = own > beta * past[group[-1]]
        shares += [(~wrong).sum(), (wrong & ~last).sum(), (wrong & last & ~beyond).sum(), (wrong & last & beyond).sum()]
    first, second, third, fourth = (100.0 * shares / now.size).tolist()
    return first, second, third, fourth


def histospec(inputs: RhymeRLInputs, seed: int) -> tuple[float, float, float]:
    """AIMD (section 5.4) on runs of reusable tokens: tokens and drafts per step, and the share of drafts accepted."""
    rng = np.random.default_rng(seed)
    # rounding down takes half a token
    median = (inputs.run_length + 0.5) / np.exp(0.5 * inputs.run_spread**2)
    steps = tokens = drafts = accepted = 0
    for run in np.floor(median * np.exp(inputs.run_spread * rng.standard_normal(20_000))).astype(int).tolist():
        window, left = 2, run
        while left >= 0:
            right = min(left, window)
            steps, tokens, drafts, accepted = steps + 1, tokens + right + 1, drafts + window, accepted + right
            # the target's own token is the next one of the run, or what ends it
            left -= right + 1
            window = min(window + 2, 32)
    return tokens / steps, drafts / steps, accepted / drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What an arm of the ablation does."""

    is_pipelined: bool = True
    has_tiers: bool = True
    drafts: bool = False


ARMS = {
    "one step off": Arm(is_pipelined=False),
    "HistoPipe": Arm(has_tiers=False),
    "two tiers": Arm(),
    "HistoSpec": Arm(drafts=True),
}


class Training:
    """Steps of rollout and learning, worker by worker.

    Args:
        train_s: what learning from a step takes.
    """

    def __init__(self, inputs: RhymeRLInputs, arm: Arm, train_s: float, seed: int) -> None:
        self._inputs, self._arm, self._train_s, self._rng = inputs, arm, train_s, np.random.default_rng(seed)
        line = StepLine(base=inputs.base_ms, request=inputs.request_ms, steep=inputs.row_ms, knee=inputs.knee_rows)
        tokens, drafts, _ = histospec(inputs, seed) if arm.drafts else (1.0, 0.0, 0.0)
        # nothing is drafted for batches that would not gain (section 5.4)
        self._token_ms: Callable[[int], float] = cache(lambda b: min(line.ms(b), line.ms(b, drafts) / tokens))
        self._names = [f"w{i}" for i in range(int(inputs.workers))]
        self._beta = histopipe.LEAST_GROWTH
        # worker -> tokens, and contexts, that the next step of it begins with
        self._deferred: dict[str, list[tuple[float, float]]] = {}
        self.migrated, self.answers = 0, 0
        # [steps][W] seconds of each worker
        self.taken: list[Floats] = []

    def run(self) -> float:
        """Seconds of a step in the mean, without the first quarter of the steps."""
        ends, learned = np.zeros(len(self._names)), [0.0, 0.0]
        for step in range(int(self._inputs.steps)):
            taken = self._rollout(step)
            self.taken.append(taken)
            # off-policyness is one, so the weights are those of the step before the last
            ends = np.maximum(ends if self._arm.is_pipelined else ends.max(), learned[-2]) + taken
            learned.append(max(learned[-1], float(ends.max())) + self._train_s)
        quarter = len(learned) // 4
        return (learned[-1] - learned[quarter]) / (len(learned) - 1 - quarter)

    def _rollout(self, step: int) -> Floats:
        """[W] seconds of each worker."""
        inputs = self._inputs
        before, now = epochs(inputs, inputs.own_spread[0], self._rng, int(inputs.prompts))
        past = medians(before)
        groups = histopipe.ranks(past, min(int(inputs.ranks), len(self._names)))
        homes = {problem: self._names[i % len(self._names)] for i, problem in enumerate(past)}
        if self._arm.is_pipelined:
            means = [float(np.mean([past[problem] for problem in group])) for group in groups]
            homes = histopipe.pipeline(groups, self._names, step, self._workers(means))
        batches: dict[str, list[float]] = {name: [] for name in self._names}
        for problem, lengths in zip(past, now.tolist(), strict=True):
            batches[homes[problem]] += lengths
        late, self._deferred = self._deferred, {}
        if self._arm.is_pipelined:
            self._migrate(batches, {homes[p]: (i, past[group[-1]]) for i, group in enumerate(groups) for p in group})
        self.answers += now.size
        self._beta = histopipe.growth(past, medians(now))
        return np.asarray([self._seconds(batches[name], late.get(name, [])) for name in self._names])

    def _seconds(self, lengths: Sequence[float], late: Sequence[tuple[float, float]]) -> float:
        """Of a batch, and what the step before left to it."""
        whole: Ints = np.ceil([*lengths, *(tokens for tokens, _ in late)]).astype(np.int64)
        fill_ms = self._inputs.prefill_ms * sum(context for _, context in late)
        return (drain_ms(whole, self._token_ms) + fill_ms) / 1e3 if len(whole) else 0.0

    def _workers(self, means: Sequence[float]) -> list[int] | None:
        """Of each rank, by the time of answers that spread about its mean."""
        inputs = self._inputs
        own = inputs.length_spread * inputs.own_spread[0] / float(np.hypot(1.0, inputs.own_spread[0]))
        answers = inputs.prompts * inputs.samples / inputs.ranks

        @cache
        def tau(length: float, workers: int) -> float:
            size = max(round(answers / workers), 1)
            places = [NormalDist().inv_cdf((i + 0.5) / size) for i in range(size)]
            return self._seconds(np.minimum(length * np.exp(own * np.asarray(places)), inputs.longest).tolist(), [])

        if not self._arm.has_tiers:
            return None
        return histopipe.workers_of_ranks(means, len(self._names), tau, train_s=self._train_s, precision_s=0.2)

    def _migrate(self, batches: dict[str, list[float]], ranks: Mapping[str, tuple[int, float]]) -> None:
        """Outliers of short ranks go on at workers of the longest one, those of long ranks in the next step."""
        most = max(number for number, _ in ranks.values())
        takers = cycle(name for name, (number, _) in ranks.items() if number == most)
        for name, (number, longest) in ranks.items():
            lengths = np.sort(batches[name])
            at = max(float(np.quantile(lengths, 1.0 - histopipe.LAST)), self._beta * longest)
            running = {str(length): int(at) + 1 for length in lengths[lengths > at + 1.0].tolist()}
            for answer in map(float, histopipe.outliers(running, len(lengths), longest, self._beta, lambda _: True)):
                batches[name][batches[name].index(answer)] = at
                self.migrated += 1
                if number < (most + 1) // 2:
                    batches[next(takers)].append(answer)
                else:
                    self._deferred.setdefault(name, []).append((answer - at, at))


def run(inputs: RhymeRLInputs, seed: int) -> StudyReport:
    """RhymeRL, Table 2 and section 7.2: ranks by last epoch's lengths, and what each part adds.

    The paper prints no lengths and no times, nor how its GPUs are shared.
    """
    figures: dict[str, float] = {}
    spreads = dict(zip(("first", "second", "third"), inputs.own_spread, strict=True))
    table: list[tuple[Cell, ...]] = []
    for (dataset, count), printed in TABLE_2.items():
        cells = []
        for name, ours, theirs in zip(ROWS, ranked(inputs, spreads[dataset], count, seed), printed, strict=True):
            figures[f"{dataset} {count} {name}"] = ours / theirs
            fitted = "*" if count == 8 and name == ROWS[0] else ""
            cells.append(f"{ours:.2f} / {theirs:.2f} {error_of(ours, theirs)}{fitted}")
        table.append((dataset, str(count), *cells))
    arms = tuple(_arms(inputs, seed, figures))
    tokens, drafts, share = histospec(inputs, seed)
    figures |= {"tokens per step": tokens, "accepted drafts": share}
    return StudyReport(
        title="RhymeRL: Math-14B, 128 GPUs, answers of up to 16K tokens",
        tables=(
            ResultTable("Table 2, percent of answers, ours / paper", ("data set", "ranks", *ROWS), tuple(table)),
            ResultTable(
                "section 7.2, each over the arm before",
                ("arm", "s per step", "ours", "paper", "error", "busy", "migrated"),
                arms,
            ),
        ),
        figures=figures,
        findings=(
            "Fitted: accuracy with 8 ranks (*), the lengths to two idle shares of a step of plain rollout"
            f" ({figures['first idles']:.0%} of the first worker for 76 %, {figures['idle']:.0%} of all for 46 %), and"
            " the runs to the acceptance of drafts.",
            "Lengths, step times, prompts of a step and the share of GPUs that train are not printed.",
            "Wrong answers are the longest of their rank. With a tenth of each rank as the last ones, the printed"
            " columns would need nearly all wrong ones in two of eight ranks: the paper must mean another tenth.",
            f"HistoSpec gains {tokens:.1f} tokens a step with {drafts:.1f} drafts, of which {share:.0%} are right. No"
            f" step is shorter than the trainer's {figures['train s']:.1f} s, which follow from a share that is free.",
        ),
    )


def _arms(inputs: RhymeRLInputs, seed: int, figures: dict[str, float]) -> Iterator[tuple[Cell, ...]]:
    plain = Training(inputs, ARMS["one step off"], 0.0, seed)
    train_s = inputs.train_share * plain.run()
    figures["first idles"], figures["idle"] = (
        float(np.mean([1.0 - of(taken) / taken.max() for taken in plain.taken])) for of in (np.min, np.mean)
    )
    seconds: list[float] = []
    for name, arm in ARMS.items():
        training = Training(inputs, arm, train_s, seed)
        seconds.append(training.run())
        busy = float(np.mean(training.taken)) / seconds[-1]
        cells = ("-", "-", "-")
        if name in ABLATION:
            figures[name] = seconds[-2] / seconds[-1]
            cells = _beside(figures[name], ABLATION[name])
        yield name, f"{seconds[-1]:.1f}", *cells, f"{busy:.0%}", f"{training.migrated / training.answers:.1%}"
    figures["train s"] = train_s
    for name, count in (("both of HistoPipe", 2), ("all three", 3)):
        figures[name] = seconds[0] / seconds[count]
        yield name, f"{seconds[count]:.1f}", *_beside(figures[name], math.prod([*ABLATION.values()][:count])), "-", "-"


def _beside(ours: float, theirs: float) -> tuple[str, str, str]:
    return f"{ours:.2f}x", f"{theirs:.2f}x", error_of(ours, theirs)
