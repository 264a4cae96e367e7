"""`specrollout bench hang`: a drafter, its process or the history's disk stands still, and what steps take meanwhile.

What belongs here: that no step waits for it, that drafts are met again afterwards, and that all tokens are stock's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from vllm_specrollout.errors import ConfigError

from ..policy.reward import problems
from ..runner.engines import IN_ONE_PROCESS, PROMPT_LEN, STOCK, Engines, sampling
from ..runner.models import DRAFT, find_model
from ..runner.report import Found, number
from ..runner.runs import Run, first_difference
from ..runner.scenario import EngineScenario, Session, command, flag

DRAFTER, PROCESS, DISK = "drafter", "process", "disk"
"""A drafter that may block, a drafter's own process, and writes to the history's folder."""
KINDS = (DRAFTER, PROCESS, DISK)
MOST = 2.0
"""Times the usual step, which a step may take beyond the time limit of drafters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Decode steps of one part of a run."""

    steps: int
    # milliseconds
    usual_ms: float
    longest_ms: float
    # draft nodes and tokens, of a request's step
    drafted: float
    tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of hang."""

    what: str
    identical: bool
    difference: str | None
    # whether no step took too long, and drafts came again; None where an output is not stock's
    passed: bool | None
    # seconds that it lasted, and milliseconds that a drafter may take of a step
    hang_s: float
    limit_ms: float
    # of the run before, in which nothing hung
    usual: Part
    # of the run with it: until it began, while it lasted, and afterwards
    before: Part
    during: Part
    after: Part


@dataclass(frozen=True, kw_only=True)
class Hang(EngineScenario):
    """Let a drafter, its process or the disk stand still during a run, and tell what steps take meanwhile."""

    bench: ClassVar[str] = "hang"

    size: str = flag("150M", "The policy's cost: that of a model of 30M, 150M or 400M.")
    kinds: tuple[str, ...] = flag(KINDS, "What stands still.", "--what", choices=KINDS)
    seconds: float = flag(10.0, "How long.", within=(0.1, 20))
    after_s: float = flag(5.0, "Seconds from a run's beginning until then.", within=(0.1, 600))
    device: str = flag("cpu:1", "Cores that a drafter's process has to itself.")
    seqs: int = flag(4, "Requests at once.", "--batch", within=(1, 64))
    requests: int = flag(32, "Requests of a run, which must go on for long enough.", within=(1, 1000))
    max_tokens: int = flag(160, "Tokens after which an answer is cut.", within=(2, 1 << 16))

    def measure(self, session: Session) -> Found:
        folder, title = find_model(None, self.size, self.dtype, self.cache, session.display, is_policy=True)
        report = session.display.steps(2 + 5 * len(self.kinds))
        shape = {"seqs": self.seqs, "length": PROMPT_LEN + self.max_tokens, "width": 2 * PROMPT_LEN}
        # functions travel to the worker
        environment = {**IN_ONE_PROCESS, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        rows = []
        with self.make_engines(folder, report, environment=environment, **shape) as engines:
            engines.start(STOCK)
            prompts = engines.encode(problems(self.requests, self.seed))
            truth = self._run(engines, STOCK, prompts, None)
            report("", 1)
            for what in self.kinds:
                engines.start(what, self._configuration(what, session.scratch))
                rows.append(self._row(engines, what, prompts, truth))
        return Found(model=title, rows=rows)

    def _configuration(self, what: str, scratch: Path) -> dict[str, Any]:
        own = {"budget": "fixed", "max_draft_tokens": 4, "max_depth": 4, "queue_order": "arrival"}
        if what == DRAFTER:
            return {**own, "drafters": ["ngram"]}
        if what == DISK:
            return {**own, "drafters": ["history"], "history": {"dir": str(scratch / "history")}}
        given = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 4}
        place = {"placement": "decoupled", "devices": [self.device]}
        return {**own, **place, "drafters": [], "speculative_config": given}

    def _run(self, engines: Engines, name: str, prompts: list[list[int]], options: dict[str, Any] | None) -> Run:
        params = [sampling(self.seed + i, self.max_tokens, options) for i in range(self.requests)]
        arrivals = [max(0, i - self.seqs + 1) for i in range(self.requests)]
        engines.report(name, 0)
        return engines.run(name, prompts, params, "generate_in_waves", arrives_after=arrivals)

    def _row(self, engines: Engines, what: str, prompts: list[list[int]], truth: Run) -> Row:
        if what == DRAFTER:
            engines.ask(what, "call", function="run_on_threads")
        engines.ask(what, "call", function="watch_steps")
        runs: list[Run] = []
        told: list[dict[str, Any]] = []
        # one that warms up, one as usual, one with it
        for round_ in range(3):
            if round_ == 2:
                engines.ask(what, "call", function="hang", arguments=[what, self.after_s, self.seconds])
            runs.append(self._run(engines, what, prompts, {}))
            told.append(engines.ask(what, "call", function="watched_steps"))
            engines.report("", 1)
        difference = next((one for run in runs if (one := first_difference(truth, run)) is not None), None)
        steps, hang = told[2]["steps"], told[2]["hang"]
        if "end" not in hang or steps[-1][0] < hang["end"]:
            raise ConfigError(f"the run was over before the {what} came back", "ask for more `--requests`")
        # the step in which it begins and the one in which it ends are of it
        first = next(i for i, step in enumerate(steps) if step[0] >= hang["begin"])
        last = next(i for i, step in enumerate(steps) if step[0] >= hang["end"])
        parts = map(_part, (told[1]["steps"], steps[:first], steps[first : last + 1], steps[last + 1 :]))
        usual, before, during, after = parts
        limit_ms = max(told[2]["limit_ms"].values())
        is_short = during.longest_ms <= MOST * usual.usual_ms + limit_ms
        return Row(
            what=what,
            identical=difference is None,
            difference=None if difference is None else difference.as_text(),
            passed=None if difference is not None else is_short and after.drafted > 0.0,
            hang_s=hang["end"] - hang["begin"],
            limit_ms=limit_ms,
            usual=usual,
            before=before,
            during=during,
            after=after,
        )

    def show(self, found: Found, out: Console) -> None:
        out.print(f"{found.model}, {self.dtype}, {self.seqs} requests at once", markup=False)
        table = Table("what", "part", "steps", "usual ms", "longest ms", "at most", "drafted", "tokens", pad_edge=False)
        for row in found.rows:
            if not row.identical:
                out.print(f"{row.what}: {row.difference}", markup=False)
                continue
            for name in ("usual", "before", "during", "after"):
                part: Part = getattr(row, name)
                most = f"{MOST * row.usual.usual_ms + row.limit_ms:.1f}" if name == "during" else "-"
                times = (f"{part.usual_ms:.1f}", f"{part.longest_ms:.1f}", most)
                title = f"{row.hang_s:.1f} s" if name == "during" else name
                table.add_row(row.what, title, str(part.steps), *times, number(part.drafted), number(part.tokens))
        out.print(table)


def _part(steps: Sequence[Sequence[float]]) -> Part:
    """Of steps as `watched_steps` tells them."""
    if not steps:
        return Part(steps=0, usual_ms=0.0, longest_ms=0.0, drafted=0.0, tokens=0.0)
    times = [ms for _, ms, *_ in steps]
    requests = sum(step[2] for step in steps)
    return Part(
        steps=len(steps),
        usual_ms=statistics.median(times),
        longest_ms=max(times),
        drafted=sum(step[3] for step in steps) / requests,
        tokens=sum(step[4] for step in steps) / requests,
    )


bench_hang = command(Hang)
