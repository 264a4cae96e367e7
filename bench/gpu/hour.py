"""The hour on a GPU: benchmark commands one after the other, each a process with a limit; cut off, and resumed.

This process neither touches the device nor imports torch: a context holds memory, and an error in one outlives it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console

from vllm_specrollout.cli import flags
from vllm_specrollout.errors import ConfigError, UnsupportedError

from ..runner import leash, report
from . import machine, source
from .commands import STEPS, Job, Options, jobs

FILE, LOG = "first-hour.json", "first-hour.log"
BEGAN = "SPECROLLOUT_BEGAN"
"""Variable with the seconds since 1970 at which the deadline's clock started: what comes before Python counts too."""
SCHEMA = 4
"""Changes when a field changes its meaning or goes away."""
ATTEMPTS = 2
"""A command that failed, or in which everything ended, is begun so often and no oftener: those behind it matter too."""
WRONG, UNFINISHED = 1, 3  # exit statuses: something is not as it should be; commands are left for another start
_CLI = ["-P", "-c", "from vllm_specrollout.cli import main; main()"]
_ENGINE = "engine_child.py"  # in the command line of every engine


@dataclass(slots=True, kw_only=True)
class Attempted:
    """One command and what it gave; docs/gpu.md says what the fields mean."""

    key: str
    step: str
    name: str
    command: str
    # what else it depends on: code, versions, device
    identity: Mapping[str, Any]
    # `done`, `wrong` (it said so), `failed`, or `begun`: under way, or cut off with everything
    state: str = "begun"
    attempts: int = 0
    # UTC, of the last attempt
    began: str = ""
    seconds: float | None = None
    error: str = ""
    # tables that it printed
    output: str = ""
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def may_begin(self) -> bool:
        return self.state in ("begun", "failed") and self.attempts < ATTEMPTS


def bench_gpu(
    out: Annotated[Path, typer.Option(help="Folder for results and log; made if it does not exist.")],
    dry: Annotated[bool, typer.Option("--dry", help="Walk all steps without a GPU, on tiny shapes.")] = False,
    steps: Annotated[str, typer.Option(help=f"Which steps: {', '.join(STEPS)}.")] = ",".join(STEPS),
    cells: Annotated[str, typer.Option(help="BATCHxCONTEXT:NODES of `speed`, for example 1x1024:15.")] = "",
    arms: Annotated[str, typer.Option(help="What ours drafts: chain, tree.")] = "chain,tree",
    models: Annotated[str, typer.Option(help="Of the identity steps, and of `speed` and `curves`.")] = "0.5B,7B",
    budget: Annotated[str, typer.Option(help="`fixed` drafts as told; `auto` drafts what pays.")] = "fixed",
    seed: Annotated[int, typer.Option(help="Seed of the first request; the others count on.")] = 0,
    deadline: Annotated[float, typer.Option(help="Seconds within which it ends by itself; 0: no limit.")] = 540,
    commit: Annotated[str | None, typer.Option(help="The code's commit, where there is no git.")] = None,
) -> None:
    """Measure kernels and engines on one GPU beside stock vLLM, and keep what is done whatever happens."""
    left = float(os.environ.get(BEGAN) or time.time()) + deadline - time.time() if deadline else float("inf")
    named = flags.names(models, "--models", ("0.5B", "7B", "tiny"))
    options = Options(
        steps=tuple(step for step in STEPS if step in flags.names(steps, "--steps", STEPS)),
        is_dry=dry,
        cells=cells,
        arms=flags.names(arms, "--arms", ("chain", "tree")),
        small=named[0],
        large=named[-1],
        budget=flags.choice(budget, "--budget", ("fixed", "auto")),
        seed=flags.in_range(seed, "--seed", 0, 1 << 30),
    )
    if out.exists() and not out.is_dir():
        raise ConfigError(f"`{out}` is a file", "name a folder")
    raise typer.Exit(Hour(out.resolve(), is_dry=dry, commit=commit).run(jobs(options), time.monotonic() + left))


class Hour:
    """One start.

    Args:
        out: its folder, which may have what earlier starts have done.
    """

    def __init__(self, out: Path, *, is_dry: bool, commit: str | None = None) -> None:
        device = machine.describe()
        if not is_dry and device["gpu"] is None:
            cause = "no NVIDIA GPU can be seen: nvidia-smi names none"
            raise UnsupportedError(cause, "try `--dry` here, and run this beside a CUDA build of vLLM")
        self._out, self._is_dry = out, is_dry
        versions = {**report.versions("triton", "transformers"), "source": source.of_this_process()}
        versions["commit"] = commit or versions["commit"]
        # the digest stands for it: a commit changes with every word of the documentation
        self._identity = {name: value for name, value in versions.items() if name != "commit"} | {"gpu": device["gpu"]}
        self._head = {
            "schema": SCHEMA,
            "bench": "gpu first hour",
            "is_dry": is_dry,
            "host": {**report.host(), **device},
            "versions": versions,
            "command": shlex.join(["specrollout", *sys.argv[1:]]),
        }
        out.mkdir(parents=True, exist_ok=True)
        path = out / FILE
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        known = before["runs"] if before.get("schema") == SCHEMA else ()
        self._runs = {one["key"]: Attempted(**one) for one in known}

    def run(self, chosen: Sequence[Job], until: float) -> int:
        """All that there is time for; the exit status.

        Args:
            until: `time.monotonic()` at which the last command must have ended.
        """
        runs = [self._run_of(job) for job in chosen]
        for job, one in zip(chosen, runs, strict=True):
            while one.may_begin and until - time.monotonic() >= job.expected_s:
                self._measure(job, one, until)
        self._show(runs)
        is_left, is_wrong = any(one.may_begin for one in runs), any(one.state != "done" for one in runs)
        return UNFINISHED if is_left else WRONG if is_wrong else 0

    def _run_of(self, job: Job) -> Attempted:
        """What there is of it: the same command, of the same code with the same versions on the same device."""
        words = shlex.join(["specrollout", *job.arguments])
        key = hashlib.sha256(json.dumps([words, self._identity], sort_keys=True).encode()).hexdigest()[:16]
        fresh = Attempted(key=key, step=job.step, name=job.name, command=words, identity=self._identity)
        return self._runs.setdefault(key, fresh)

    def _measure(self, job: Job, one: Attempted, until: float) -> None:
        """One attempt; what it gave is on disk in the end, and that it was begun before."""
        one.state, one.error, one.attempts = "begun", "", one.attempts + 1
        one.began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._write()
        more = job.retry if one.attempts > 1 else ()
        print(f"{job.title}: {' '.join([one.command, *map(shlex.quote, more)])}", flush=True)
        begin, limit_s = time.monotonic(), min(job.limit_s, until - time.monotonic())
        place, printed = self._out / "report.json", self._out / "printed.txt"
        place.unlink(missing_ok=True)
        arguments = [*job.arguments, *more, *(["--out", str(place)] if job.arguments[0] == "bench" else [])]
        with printed.open("w") as tables, (self._out / LOG).open("a") as log:
            code = _finished([*_CLI, *arguments], tables, log, limit_s)
        one.seconds, one.output = round(time.monotonic() - begin, 1), printed.read_text(errors="replace")
        if place.exists():
            one.report = json.loads(place.read_text(encoding="utf-8"))
        is_told = bool(one.report) or job.arguments[0] != "bench"
        if code is None and job.limit_s > limit_s:
            one.error = "cut off at the deadline"  # it stays as it was begun
        elif code in (0, 1) and is_told:
            one.state = "wrong" if code else "done"
        else:
            one.state = "failed"
            one.error = f"no end within {limit_s:.0f} s" if code is None else f"it ended with {code}"
        self._write()
        print(f"{one.output}{job.title}: {one.state}, {one.seconds:.0f} s {one.error}", flush=True)

    def _write(self) -> None:
        """All of it; a reader finds the old file or the new one."""
        body = {**self._head, "runs": [asdict(one) for one in self._runs.values() if one.attempts]}
        scratch = self._out / f"{FILE}.new"
        scratch.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, self._out / FILE)

    def _show(self, runs: Sequence[Attempted]) -> None:
        """The overview: what is read first when only the end is at hand."""
        columns: report.Columns = {
            **{"step": "step", "command": "name", "attempts": "attempts", "seconds": "seconds"},
            "state": lambda one: one.state if one.attempts else "left",
            "error": lambda one: one.error or "-",
        }
        report.print_table(runs, columns, Console(width=150, force_terminal=False), left=2)
        print(f"{'a DRY WALK, no figure means anything; ' if self._is_dry else ''}results: {self._out / FILE}")


def _finished(program: list[str], tables: Any, log: Any, limit_s: float) -> int | None:
    """The exit status; None: it was ended at the limit, all of it."""
    process, held = leash.spawn(program, os.environ, tables, error=log)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        # engines write down where they are
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                if any(_ENGINE in word for word in child.cmdline()):
                    child.send_signal(signal.SIGUSR2)
        time.sleep(1.0)
        return None
    finally:
        # engines have groups of their own, with leashes held by the process
        held.end()
        process.wait()
