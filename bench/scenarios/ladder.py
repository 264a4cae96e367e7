"""`specrollout bench ladder`: a long tail on several workers, with idle ones helping the stragglers and without."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm_specrollout.cluster import GroupAnswer, SpecGroup
from vllm_specrollout.cluster.ladder import LADDERS
from vllm_specrollout.cluster.lending import LENT
from vllm_specrollout.cluster.planner import choose_ladder
from vllm_specrollout.cluster.reports import Report
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.scheduling.lengths import Lengths

from ..policy import DRAFT
from ..policy.reward import Problem, problems
from ..runner.engines import IN_ONE_PROCESS, PROMPT_LEN, STOCK, sampling
from ..runner.fields import Row
from ..runner.models import find_model, quarter_drafter
from ..runner.plots import plot_workers
from ..runner.report import Found, Table
from ..runner.results import LADDER
from ..runner.rows import quartiles
from ..runner.scenario import RoundsScenario, Session, command, flag
from .decoupled import QUARTER, SMALL

AUTO = "auto"
NONE, NGRAM = "none", "ngram"
_COUNTS = ("moved", "lent")
_MANY = 240  # problems of a whole batch, as a trainer has them; those that run here are the longest and some others


@dataclass(slots=True, kw_only=True)
class Bar:
    """What a worker gave to one request with the same drafters, in one run."""

    worker: str
    request: str
    # what drafted: the worker's own, a method, or whose drafter was lent
    drafter: str
    # seconds since the batch was given
    begin_s: float
    end_s: float
    tokens: int


class TimedGroup(SpecGroup):
    """Notes who told of what, and when."""

    begin_s = 0.0
    # what engines draft with by themselves
    own = ""
    bars: list[Bar]
    # (engine, request) -> its newest of them
    _newest: dict[tuple[str, str], Bar]

    def timed(
        self, ladder: str, prompts: Sequence[list[int]], params: Sequence[dict[str, Any]]
    ) -> tuple[list[GroupAnswer], float]:
        """The answers with a ladder, and the makespan in seconds. All ladders have the same engines and drafters."""
        if ladder == AUTO:
            ladder, _ = choose_ladder(self._run(self._profiles()))
        self._driver.ladder = ladder
        # the same problems again, with all ladders: none may know how long their answers were
        self._driver.lengths = Lengths()
        self.bars, self._newest, self.begin_s = [], {}, time.perf_counter()
        self._driver.listener = self.note
        answers = self.generate(prompts, params)
        return answers, time.perf_counter() - self.begin_s

    def await_drafters(self) -> None:
        """Until each engine's can draft."""
        while not all(one["drafter"] for one in self.status()["engines"].values()):
            time.sleep(0.1)

    def note(self, engine: str, report: Report) -> None:
        """What an engine tells of, before the driver takes it in."""
        now = time.perf_counter() - self.begin_s
        lent = self._lending.borrowed(engine) if self._lending is not None else {}
        for key, part in report.parts.items():
            lenders = [f"{LENT}{lender}" for lender, keys in lent.items() if key in keys]
            drafter = " and ".join([one for one in (self.own, *lenders) if one]) or "none"
            self._extend((engine, key.rpartition(".")[0]), drafter, now, len(part.tokens))

    def _extend(self, own: tuple[str, str], drafter: str, now: float, tokens: int) -> None:
        """The request's newest bar at this engine grows, or one of another colour begins where it ends."""
        bar = self._newest.get(own)
        if bar is None or bar.drafter != drafter:
            begin = now if bar is None else bar.end_s
            bar = Bar(worker=own[0], request=own[1], drafter=drafter, begin_s=begin, end_s=now, tokens=0)
            self._newest[own] = bar
            self.bars.append(bar)
        bar.end_s, bar.tokens = now, bar.tokens + tokens


@dataclass(frozen=True, kw_only=True)
class Ladder(RoundsScenario):
    """A rollout with a long tail on several workers of this host, with idle ones helping stragglers and without."""

    bench: ClassVar[str] = "ladder"

    size: str = flag("150M", "The policy's cost: that of a model of 30M, 150M or 400M.")
    workers: int = flag(2, "Engines, each on a core of its own, so that an idle one frees something.", within=(2, 64))
    ladders: tuple[str, ...] = flag(
        ("off", "move", "attach", AUTO), "Compared with the first.", "--ladder", choices=(*LADDERS, AUTO)
    )
    drafter: str = flag(
        SMALL, "What is lent: a quarter of the target's cost, or a small one.", choices=(QUARTER, SMALL)
    )
    own: str = flag(NONE, "What workers draft with by themselves.", choices=(NONE, NGRAM))
    seqs: int = flag(4, "Requests that a worker runs at once.", within=(1, 256))
    requests: int = flag(8, "Requests: samples of the longest problem of 240, and of some others.", within=(2, _MANY))
    samples: int = flag(4, "Of each problem: one worker has them, as they share its history.", within=(1, 64))
    max_tokens: int = flag(1024, "Tokens after which an answer is cut: 512 would cut the tail.", within=(2, 1 << 16))
    window: int = flag(4, "Tokens of a draft window.", within=(1, 64))
    fan_out: int = flag(4, "Choices that a lent drafter sends for each position.", within=(1, 8))
    plot: Path | None = flag(None, "Draw who worked on what, in the last round.", is_setting=False)

    def check(self) -> None:
        super().check()
        cores = len(os.sched_getaffinity(0))
        if self.workers > cores:
            raise ConfigError(
                f"`--workers` is {self.workers}, and this host has {cores} cores",
                f"give {cores} or fewer: a worker has a core of its own, and what shares one frees nothing",
            )

    def measure(self, session: Session) -> Found:
        folder, title = find_model(None, self.size, self.dtype, self.cache, session.display, is_policy=True)
        report = session.display.steps(3 + self.rounds + len(self.ladders) * (self.rounds + 1))
        params = [sampling(self.seed + i, self.max_tokens) for i in range(self.requests)]
        shape = {"seqs": self.seqs, "length": PROMPT_LEN + self.max_tokens, "width": 2 * PROMPT_LEN}
        prompts, truth = [], []
        with self.make_engines(folder, report, environment=IN_ONE_PROCESS, **shape) as engines:
            engines.start(STOCK)
            for number in range(self.rounds + 1):
                with engines.doing(f"stock's answers, round {number}"):
                    prompts.append(engines.encode(self._problems(number)))
                    truth.append(engines.run(STOCK, prompts[-1], params).token_ids)
        seconds: dict[str, list[float]] = {ladder: [] for ladder in self.ladders}
        counts: dict[str, Counter[str]] = {ladder: Counter() for ladder in self.ladders}
        differences: dict[str, str] = {}
        bars, chosen = {}, {}
        with self._group(folder, report) as group:
            for number in range(self.rounds + 1):
                for ladder in self.ladders[:: 1 if number % 2 else -1]:
                    report(f"{ladder}, round {number}", 0)
                    before = Counter({name: group.status()[name] for name in _COUNTS})
                    answers, took = group.timed(ladder, prompts[number], params)
                    for i, (answer, tokens) in enumerate(zip(answers, truth[number], strict=True)):
                        if answer.token_ids != tokens:
                            differences[ladder] = f"round {number}: request {i} differs, of {answer.engine}"
                    status = group.status()
                    # the first one warms up
                    seconds[ladder] += [took] if number else []
                    counts[ladder] += Counter({name: status[name] for name in _COUNTS}) - before
                    bars[ladder], chosen[ladder] = group.bars, status["ladder"]
                    report("", 1)
        fixed = [ladder for ladder in self.ladders if ladder != AUTO]
        best = min(fixed, key=lambda ladder: statistics.median(seconds[ladder]), default=AUTO)
        rows = [
            self._row(ladder, chosen[ladder], seconds, best, counts[ladder], differences.get(ladder))
            for ladder in self.ladders
        ]
        return Found(model=title, rows=rows, more=bars)

    def _problems(self, round_: int) -> list[Problem]:
        """Of one round, a problem for each request: history knows nothing of them. The longest of many comes first, so
        that it begins at once; its samples are the tail."""
        many = problems(_MANY, self.seed + round_)
        longest = max(many, key=lambda problem: problem.size)
        ordered = [longest, *[one for one in many if one is not longest]]
        return [ordered[i // self.samples] for i in range(self.requests)]

    def _group(self, model: Path, report: Any) -> TimedGroup:
        report("starting the engines and their drafters", 0)
        own = sorted(os.sched_getaffinity(0))
        length = PROMPT_LEN + self.max_tokens
        engine = {"dtype": self.dtype, "max_model_len": length, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
        small = quarter_drafter(self.size, self.cache) if self.drafter == QUARTER else DRAFT
        group = TimedGroup(
            str(model),
            engines=self.workers,
            devices=[f"cpu:{own[i]}" for i in range(self.workers)],
            engine={**engine, "max_num_seqs": self.seqs, "seed": 0},
            spec_rollout={
                "drafters": [] if self.own == NONE else [self.own],
                "decoupled": {"window": self.window, "fan_out": self.fan_out},
            },
            ladder="attach",
            drafters=[str(small)],
            drafter_engine={**engine, "max_num_seqs": self.seqs},
        )
        group.own = "" if self.own == NONE else self.own
        group.await_drafters()
        report("", 1)
        return group

    def _row(
        self,
        ladder: str,
        chosen: str,
        seconds: dict[str, list[float]],
        best: str,
        counts: Counter[str],
        difference: str | None,
    ) -> Row:
        ratios, of_best = (
            [base / own for base, own in zip(seconds[other], seconds[ladder], strict=True)]
            for other in (self.ladders[0], best)
        )
        told = {name: counts[name] for name in _COUNTS}
        row = Row(ladder=ladder, chosen=chosen, identical=difference is None, difference=difference, **told)
        if difference is not None:
            return row
        return row.but(
            makespan_s=statistics.median(seconds[ladder]),
            speedup=statistics.median(ratios),
            quartiles=quartiles(ratios),
            of_best=statistics.median(of_best),
        )

    def title(self, found: Found) -> str:
        return f"{found.model}, {self.dtype}, {self.workers} workers, {self.requests} requests"

    def told(self, found: Found) -> Iterator[Table | str]:
        yield Table(found.rows, LADDER)
        yield from (f"{row.ladder}: {row.difference}" for row in found.rows if row.difference is not None)

    def draw(self, found: Found, path: Path) -> None:
        plot_workers(found.more, f"{found.model}: who worked on what", path)


bench_ladder = command(Ladder)
