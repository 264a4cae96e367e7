"""The hour on a GPU: benchmark commands one after the other, each a process with a limit; cut off, and resumed.

This process neither touches the device nor imports torch: a context holds memory, and an error in one outlives it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console

from vllm_specrollout.cli import flags
from vllm_specrollout.errors import ConfigError, UnsupportedError

from ..runner import leash, report
from . import caches, machine, source
from .commands import STEPS, Command, Options, commands

FILE, LOG = "first-hour.json", "first-hour.log"
BEGAN = "SPECROLLOUT_BEGAN"
"""Variable with the seconds since 1970 at which the deadline's clock started: what comes before Python counts too."""
SCHEMA = 3
"""Changes when a field changes its meaning or goes away."""
ATTEMPTS = 2
"""A command that failed, or in which everything ended, is begun so often and no oftener: those behind it matter too."""
WRONG, UNFINISHED = 1, 3  # exit statuses: something is not as it should be; commands are left for another start
_CLOSING_S = 15.0  # what packing the caches and printing may take of the deadline
_CLI = ["-P", "-c", "from vllm_specrollout.cli import main; main()"]
_ENGINE = "engine_child.py"  # in the command line of every engine


class Stopped(BaseException):
    """A signal asks for the end; its number."""


@dataclass(slots=True, kw_only=True)
class Run:
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
        return self.state not in ("done", "wrong") and self.attempts < ATTEMPTS


def bench_gpu(
    out: Annotated[Path, typer.Option(help="Folder for results, log and caches; made if it does not exist.")],
    dry: Annotated[bool, typer.Option("--dry", help="Walk all steps without a GPU, on tiny shapes.")] = False,
    steps: Annotated[str, typer.Option(help=f"Which steps: {', '.join(STEPS)}.")] = ",".join(STEPS),
    cells: Annotated[str, typer.Option(help="BATCHxCONTEXT:NODES of `speed`, for example 1x1024:15.")] = "",
    arms: Annotated[str, typer.Option(help="What ours drafts: chain, tree.")] = "chain,tree",
    models: Annotated[str, typer.Option(help="Of the identity steps, and of `speed` and `curves`.")] = "0.5B,7B",
    budget: Annotated[str, typer.Option(help="`fixed` drafts as told; `auto` drafts what pays.")] = "fixed",
    seed: Annotated[int, typer.Option(help="Seed of the first request; the others count on.")] = 0,
    deadline: Annotated[float, typer.Option(help="Seconds within which it ends by itself; 0: no limit.")] = 540,
    resume: Annotated[list[Path] | None, typer.Option(help="Folder with earlier results and caches.")] = None,
    work: Annotated[Path, typer.Option(help="Folder to work in, the same for every start.")] = source.WORK,
    commit: Annotated[str | None, typer.Option(help="The code's commit, where there is no git.")] = None,
) -> None:
    """Measure kernels and engines on one GPU beside stock vLLM, and keep what is done whatever happens."""
    began = float(os.environ.get(BEGAN) or time.time())
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
    for folder in (out, work):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"`{folder}` is a file", "name a folder")
        folder.mkdir(parents=True, exist_ok=True)
    with _alone(work), (out / LOG).open("a", encoding="utf-8") as log, _stoppable():
        hour = Hour(commands(options), out, work, [*(resume or []), work], log, dry, commit)
        left = began + deadline - time.time() - _CLOSING_S if deadline else float("inf")
        code = hour.run(time.monotonic() + left)
    raise typer.Exit(code)


class Hour:
    """One start.

    Args:
        chosen: in their order.
        earlier: folders that are only read: results and caches of earlier starts.
        log: open file that everything said goes into.
    """

    def __init__(
        self,
        chosen: Sequence[Command],
        out: Path,
        work: Path,
        earlier: Sequence[Path],
        log: Any,
        is_dry: bool,
        commit: str | None = None,
    ) -> None:
        self._chosen, self._log, self._is_dry = chosen, log, is_dry
        self._out, self._work = out.resolve(), work.resolve()
        device = machine.describe()
        if not is_dry and device["gpu"] is None:
            cause = "no NVIDIA GPU can be seen: nvidia-smi names none"
            raise UnsupportedError(cause, "try `--dry` here, and run this beside a CUDA build of vLLM")
        self._begin, self._used_mib = time.monotonic(), device.get("gpu_memory_used_mib")
        versions = {**report.versions("triton", "transformers"), "source": source.of_this_process()}
        versions["commit"] = commit or versions["commit"]
        # the digest stands for it: a commit changes with every word of the documentation
        self._identity = {name: value for name, value in versions.items() if name != "commit"} | {"gpu": device["gpu"]}
        self._head = {
            "bench": "gpu first hour",
            "is_dry": is_dry,
            "host": {**report.host(), **device},
            "versions": versions,
            "command": shlex.join(["specrollout", *sys.argv[1:]]),
        }
        self._notes: list[str] = []
        self._runs: dict[str, Run] = {}
        self._caches = caches.folders(self._work)
        for folder in (*earlier, out):
            self._read(folder / FILE)
            if count := caches.unpack(self._caches, folder):
                self._say(f"{count} files from caches in {folder}")
        for text in machine.strangers():
            self._note(text)
        # as it was when it was packed last
        self._packed = caches.state(self._caches) if caches.is_packed(self._caches, out) else None

    def run(self, until: float) -> int:
        """All that there is time for; the exit status.

        Args:
            until: `time.monotonic()` at which the last command must have ended.
        """
        code = 0
        try:
            for command in self._chosen:
                one = self._run_of(command)
                while one.may_begin and until - time.monotonic() >= command.expected_s:
                    self._measure(command, one, until)
                    self._free_and_pack()
                if one.may_begin:
                    self._say(f"{command.title}: no time left for it")
            # of what an earlier start has compiled, too: the next one may know this folder alone
            self._pack()
        except Stopped as stopped:
            code = 128 + stopped.args[0]
            self._note(f"stopped by {signal.Signals(stopped.args[0]).name}")
        finally:
            self._write()
            self._show()
        runs = [self._run_of(command) for command in self._chosen]
        is_left, is_wrong = any(one.may_begin for one in runs), any(one.state != "done" for one in runs)
        return code or (UNFINISHED if is_left else WRONG if is_wrong else 0)

    def _run_of(self, command: Command) -> Run:
        """What there is of it: the same command, of the same code with the same versions on the same device."""
        words = shlex.join(["specrollout", *command.arguments])
        key = hashlib.sha256(json.dumps([words, self._identity], sort_keys=True).encode()).hexdigest()[:16]
        fresh = Run(key=key, step=command.step, name=command.name, command=words, identity=self._identity)
        return self._runs.setdefault(key, fresh)

    def _measure(self, command: Command, one: Run, until: float) -> None:
        """One attempt; what it gave is on disk in the end, and that it was begun before."""
        one.state, one.error, one.attempts = "begun", "", one.attempts + 1
        one.began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._write()
        more = command.retry if one.attempts > 1 else ()
        self._say(f"{command.title}: {' '.join([one.command, *map(shlex.quote, more)])}")
        begin, limit_s = time.monotonic(), min(command.limit_s, until - time.monotonic())
        place, printed = self._work / "report.json", self._work / "printed.txt"
        place.unlink(missing_ok=True)
        arguments = [*command.arguments, *more, *(["--out", str(place)] if command.arguments[0] == "bench" else [])]
        environment = {**os.environ, **caches.environment(self._work)}
        with printed.open("w") as tables:
            code = self._finished([*_CLI, *arguments], environment, tables, limit_s)
        one.seconds, one.output = round(time.monotonic() - begin, 1), printed.read_text(errors="replace")
        if place.exists():
            one.report = json.loads(place.read_text(encoding="utf-8"))
        is_told = bool(one.report) or command.arguments[0] != "bench"
        if code is None and command.limit_s > limit_s:
            # out of time, it stays as it was begun
            self._say(f"{command.title}: cut off at the deadline")
        elif code in (0, 1) and is_told:
            one.state = "wrong" if code else "done"
        else:
            one.state = "failed"
            one.error = f"no end within {limit_s:.0f} s" if code is None else f"it ended with {code}"
        self._write()
        self._print(one.output)
        self._say(f"{command.title}: {one.state}, {one.seconds:.0f} s {one.error}")

    def _finished(self, program: list[str], environment: Mapping[str, str], tables: Any, limit_s: float) -> int | None:
        """The exit status; None: it was ended at the limit, all of it. What it logs goes into the log."""
        process, held = leash.spawn(program, environment, tables, error=self._log)
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

    def _free_and_pack(self) -> None:
        """The device's memory is back, and what was compiled is kept."""
        if not self._is_dry and (still := machine.wait_until_free(self._used_mib)):
            self._note(still)
        self._pack()

    def _pack(self) -> None:
        built = caches.state(self._caches)
        if built != self._packed:
            for note in caches.pack(self._caches, self._out):
                self._note(note)
            self._packed = built

    def _read(self, path: Path) -> None:
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            runs = [Run(**one) for one in body["runs"]] if body["schema"] == SCHEMA else []
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._note(f"`{path}` could not be read, so its commands run again: {error}")
            return
        for one in runs:
            known = self._runs.get(one.key)
            if known is None or (not one.may_begin, one.attempts) >= (not known.may_begin, known.attempts):
                self._runs[one.key] = one

    def _write(self) -> None:
        """All of it, in both folders; a reader finds the old file or the new one."""
        begun = [asdict(one) for one in self._runs.values() if one.attempts]
        body = {"schema": SCHEMA, **self._head, "runs": begun, "notes": list(dict.fromkeys(self._notes))}
        for folder in (self._out, self._work):
            scratch = folder / f"{FILE}.new"
            scratch.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
            os.replace(scratch, folder / FILE)

    def _show(self) -> None:
        """The overview: what is read first when only the end is at hand."""
        columns: report.Columns = {
            **{"step": "step", "command": "name", "attempts": "attempts", "seconds": "seconds"},
            "state": lambda one: one.state if one.attempts else "left",
            "error": lambda one: one.error or "-",
        }
        text = io.StringIO()
        runs = [self._run_of(command) for command in self._chosen]
        report.print_table(runs, columns, Console(file=text, width=150, force_terminal=False), left=2)
        self._print(text.getvalue())
        for note in dict.fromkeys(self._notes):
            self._say(f"note: {note[:300]}")
        self._say(f"{'a DRY WALK, no figure means anything; ' if self._is_dry else ''}results: {self._out / FILE}")

    def _note(self, text: str) -> None:
        self._say(text)
        self._notes.append(text)

    def _say(self, text: str) -> None:
        self._print(f"[{time.monotonic() - self._begin:5.0f} s] {text}\n")

    def _print(self, text: str) -> None:
        for place in (sys.stdout, self._log):
            # nobody may read any more, and the results still count
            with contextlib.suppress(OSError):
                place.write(text)
                place.flush()


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Hold the folder: two starts at once would measure each other.

    Raises:
        UnsupportedError: another start holds it.
    """
    with (work / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            way = "wait for its end, or name another folder with `--work`"
            raise UnsupportedError(f"another start works in `{work}`", way) from None
        yield


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Signals that ask for the end raise `Stopped`, once: the tables are still printed."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def stop(number: int, _: Any) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
