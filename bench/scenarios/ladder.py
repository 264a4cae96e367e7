"""`specrollout bench ladder`: a long tail on several workers, with idle ones helping the stragglers and without."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from vllm_specrollout.bench.policy import DRAFT
from vllm_specrollout.bench.policy.reward import Problem, problems

from vllm_specrollout.cluster import SpecGroup
from vllm_specrollout.cluster.ladder import LADDERS
from vllm_specrollout.cluster.planner import choose_ladder
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.scheduling.lengths import Lengths

from ..runner.engines import IN_ONE_PROCESS, PROMPT_LEN, STOCK, run_round, sampling
from ..runner.fields import Row
from ..runner.models import find_model, quarter_drafter
from ..runner.report import Found, Table
from ..runner.results import LADDER
from ..runner.rows import Pair, Run, difference_of, quartiles, ratio, ratios
from ..runner.scenario import RoundsScenario, Session, command, flag
from .decoupled import QUARTER, SMALL

AUTO = "auto"
NONE, NGRAM = "none", "ngram"
_COUNTS = ("moved", "lent")
_MANY = 240  # problems of a whole batch, as a trainer has them; those that run here are the longest and some others


class TimedGroup(SpecGroup):
    """A group whose ladder changes between batches."""

    def timed(self, ladder: str, prompts: Sequence[list[int]], params: Sequence[dict[str, Any]]) -> Run:
        """The answers with a ladder, all of which have the same engines and drafters; of times, the makespan alone."""
        if ladder == AUTO:
            ladder, _ = choose_ladder(self._run(self._profiles()))
        self._driver.ladder = ladder
        # the same problems again, with all ladders: none may know how long their answers were
        self._driver.lengths = Lengths()
        begin = time.perf_counter()
        answers = self.generate(prompts, params)
        seconds = time.perf_counter() - begin
        ends = (seconds,) * len(answers)
        return Run(token_ids=tuple(tuple(one.token_ids) for one in answers), finish_s=ends, step_s=(seconds,))

    def await_drafters(self) -> None:
        """Until each engine's can draft."""
        while not all(one["drafter"] for one in self.status()["engines"].values()):
            time.sleep(0.1)


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
        prompts: dict[int, list[list[int]]] = {}
        stock: dict[int, Run] = {}
        with self.make_engines(folder, report, environment=IN_ONE_PROCESS, **shape) as engines:
            engines.start(STOCK)
            for number in range(-1, self.rounds):
                with engines.doing(f"stock's answers, round {number + 1}"):
                    prompts[number] = engines.encode(self._problems(number))
                    stock[number] = engines.run(STOCK, prompts[number], params)
        pairs: dict[str, list[Pair]] = {ladder: [] for ladder in self.ladders}
        counts: dict[str, Counter[str]] = {ladder: Counter() for ladder in self.ladders}
        chosen: dict[str, str] = {}
        with self._group(folder, report) as group:

            def run(ladder: str | None, number: int) -> Run:
                if ladder is None:
                    return stock[number]
                report(f"{ladder}, round {number + 1}", 0)
                before = group.status()
                made, after = group.timed(ladder, prompts[number], params), group.status()
                counts[ladder] += Counter({name: after[name] - before[name] for name in _COUNTS})
                chosen[ladder] = after["ladder"]
                report("", 1)
                return made

            for number in stock:
                for ladder, pair in run_round(number, self.ladders, partial(run, number=number)).items():
                    pairs[ladder].append(pair)
        fixed = [ladder for ladder in self.ladders if ladder != AUTO]
        best = min(fixed, key=lambda ladder: ratio(pairs[ladder], pairs[self.ladders[0]]), default=AUTO)
        rows = [self._row(ladder, chosen[ladder], pairs, best, counts[ladder]) for ladder in self.ladders]
        return Found(model=title, rows=rows)

    def _problems(self, number: int) -> list[Problem]:
        """Of one round, a problem for each request: history knows nothing of them. The longest of many comes first, so
        that it begins at once; its samples are the tail."""
        many = problems(_MANY, self.seed + number + 1)
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
        group.await_drafters()
        report("", 1)
        return group

    def _row(
        self, ladder: str, chosen: str, pairs: Mapping[str, Sequence[Pair]], best: str, counts: Counter[str]
    ) -> Row:
        """Ratios are to the first ladder, and to the best one, round by round."""
        wrong, told = difference_of(pairs[ladder]), {name: counts[name] for name in _COUNTS}
        row = Row(ladder=ladder, chosen=chosen, identical=wrong is None, difference=wrong, **told)
        if wrong is not None:
            return row
        base, of_best = (ratios(pairs[other], pairs[ladder]) for other in (self.ladders[0], best))
        return row.but(
            makespan_s=statistics.median(pair.ours.wall_s for pair in pairs[ladder] if pair.is_timed),
            speedup=statistics.median(base),
            quartiles=quartiles(base),
            of_best=statistics.median(of_best),
        )

    def title(self, found: Found) -> str:
        return f"{found.model}, {self.dtype}, {self.workers} workers, {self.requests} requests"

    def told(self, found: Found) -> Iterator[Table | str]:
        yield Table(found.rows, LADDER)
        yield from (f"{row.ladder}: {row.difference}" for row in found.rows if row.difference is not None)


bench_ladder = command(Ladder)
