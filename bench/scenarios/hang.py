"""`specrollout bench hang`: a drafter, its process or the history's disk stands still, and what steps take meanwhile.

What belongs here: that no step waits for it, that drafts are met again afterwards, and that all tokens are stock's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from vllm_specrollout.errors import ConfigError

from ..policy import DRAFT
from ..policy.reward import problems
from ..runner.engines import IN_ONE_PROCESS, PROMPT_LEN, STOCK, Engines, sampling
from ..runner.models import find_model
from ..runner.report import Found, number
from ..runner.runs import Run, first_difference
from ..runner.scenario import EngineScenario, Session, command, flag

DRAFTER, PROCESS, DISK = "drafter", "process", "disk"
"""A drafter that may block, a drafter's own process, and writes to the history's folder."""
KINDS = (DRAFTER, PROCESS, DISK)
Steps = Sequence[Sequence[float]]
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
    """One kind of hang; nothing but the first difference is told where an output is not stock's."""

    what: str
    identical: bool = True
    difference: str | None = None
    # whether no step took longer than `most_ms`, and drafts came again
    passed: bool | None = None
    # seconds that it lasted
    hang_s: float | None = None
    # milliseconds: what a drafter may take of a step, and what a step may take while it lasts
    limit_ms: float | None = None
    most_ms: float | None = None
    # "usual": of the run before, in which nothing hung; "before", "during" and "after": of the run with it
    parts: Mapping[str, Part] = field(default_factory=dict)


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
        if difference is not None:
            return Row(what=what, identical=False, difference=difference.as_text())
        return judged(what, told[1]["steps"], **told[2])

    def show(self, found: Found, out: Console) -> None:
        out.print(f"{found.model}, {self.dtype}, {self.seqs} requests at once", markup=False)
        table = Table("what", "part", "steps", "usual ms", "longest ms", "at most", "drafted", "tokens", pad_edge=False)
        for row in found.rows:
            if not row.identical:
                out.print(f"{row.what}: {row.difference}", markup=False)
            for name, part in row.parts.items():
                is_during = name == "during"
                times = (f"{part.usual_ms:.1f}", f"{part.longest_ms:.1f}", f"{row.most_ms:.1f}" if is_during else "-")
                drafts = (number(part.drafted), number(part.tokens))
                table.add_row(row.what, f"{row.hang_s:.1f} s" if is_during else name, str(part.steps), *times, *drafts)
        out.print(table)


def judged(what: str, usual: Steps, steps: Steps, hang: Mapping[str, float], limit_ms: Mapping[int, float]) -> Row:
    """Of steps and a hang as `worker_calls.watched_steps` tells them; `usual` are those of a run without it.

    Raises:
        ConfigError: the run was over before the hang was.
    """
    if "end" not in hang or not steps or steps[-1][0] < hang["end"]:
        raise ConfigError(f"the run was over before the {what} came back", "ask for more `--requests`")
    # the step in which it begins and the one in which it ends are of it
    first = next(i for i, step in enumerate(steps) if step[0] >= hang["begin"])
    last = next(i for i, step in enumerate(steps) if step[0] >= hang["end"])
    told = {"usual": usual, "before": steps[:first], "during": steps[first : last + 1], "after": steps[last + 1 :]}
    parts = {name: _part(own) for name, own in told.items()}
    limit = max(limit_ms.values())
    most_ms = MOST * parts["usual"].usual_ms + limit
    return Row(
        what=what,
        passed=parts["during"].longest_ms <= most_ms and parts["after"].drafted > 0.0,
        hang_s=hang["end"] - hang["begin"],
        limit_ms=limit,
        most_ms=most_ms,
        parts=parts,
    )


def _part(steps: Steps) -> Part:
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
