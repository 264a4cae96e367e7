"""The command of the GPU measurements: step by step, row by row, to be cut off at any time and gone on with."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_specrollout.cli import flags
from vllm_specrollout.errors import ConfigError, UnsupportedError

from ..runner import report
from . import caches, machine, show, source
from .engines import LOGS
from .parts import FIRST_HOUR, STEPS, Options, parts
from .plan import ARMS, DRAFTS, MODELS, RIVALS, Cell
from .record import Record
from .walk import Walk

LOG = "first-hour.log"
BEGAN = "SPECROLLOUT_BEGAN"
"""Variable with the seconds since 1970 at which the deadline's clock started: what comes before Python counts too."""
_CLOSING_S = 15.0
"""What packing the caches and printing the tables may take of the deadline."""
_LOG_LINES = 80
WRONG, UNFINISHED = 1, 3  # exit statuses: something is not as it should be; rows are left for another start


class Stopped(BaseException):
    """A signal asks for the end; its number."""


def run(
    out: Annotated[Path, typer.Option(help="Folder for results, log and caches; made if it does not exist.")],
    dry: Annotated[bool, typer.Option("--dry", help="Walk all steps without a GPU, on tiny shapes.")] = False,
    steps: Annotated[str, typer.Option(help=f"Which steps: {', '.join(STEPS)}.")] = ",".join(FIRST_HOUR),
    cells: Annotated[
        str | None, typer.Option(help="BATCHxCONTEXT of `kernels` and `speed`, for example 1x1024,32x1024.")
    ] = None,
    taus: Annotated[str, typer.Option(help="Tokens a step to reach in `speed`: 2, 4, 6.5.")] = "4,6.5",
    arms: Annotated[str, typer.Option(help="What ours drafts: chain, tree.")] = ",".join(ARMS),
    rivals: Annotated[str, typer.Option(help=f"vLLM's own methods in `speed`: {', '.join(RIVALS)}.")] = "",
    models: Annotated[
        str, typer.Option(help="Models of the identity steps, and of `kernels` and `speed`.")
    ] = "0.5B,7B",
    budget: Annotated[str, typer.Option(help="`fixed` drafts as told; `auto` drafts what pays.")] = "fixed",
    seed: Annotated[int, typer.Option(help="Seed of the first request; the others count on.")] = 0,
    deadline: Annotated[
        float, typer.Option(help="Seconds within which it ends by itself; 0: as long as it takes.")
    ] = 540,
    resume: Annotated[
        list[Path] | None, typer.Option(help="Folder with an earlier start's results and caches; may be given twice.")
    ] = None,
    work: Annotated[Path, typer.Option(help="Folder to work in, the same for every start.")] = source.WORK,
    commit: Annotated[str | None, typer.Option(help="The code's commit, where there is no git.")] = None,
) -> None:
    """Measure kernels and engines on one GPU beside stock vLLM, and keep what is done whatever happens."""
    began = float(os.environ.get(BEGAN) or time.time())
    chosen = flags.names(steps, "--steps", tuple(STEPS))
    if dry and "memory" in chosen:
        raise ConfigError("`--steps memory` has nothing to measure in a dry walk", "leave it out")
    named = flags.names(models, "--models", tuple(MODELS))
    known_taus = {f"{tau:g}": tau for tau in DRAFTS}
    options = Options(
        work=work.resolve(),
        steps=tuple(step for step in STEPS if step in chosen),
        is_dry=dry,
        cells=None if cells is None else tuple(Cell.parse(text.strip()) for text in cells.split(",")),
        taus=tuple(known_taus[text] for text in flags.names(taus, "--taus", tuple(known_taus))),
        arms=flags.names(arms, "--arms", ARMS),
        rivals=flags.names(rivals, "--rivals", RIVALS) if rivals else (),
        small=named[0],
        large=named[-1],
        budget=flags.choice(budget, "--budget", ("fixed", "auto")),
        seed=flags.in_range(seed, "--seed", 0, 1 << 30),
    )
    for folder in (out, options.work):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"`{folder}` is a file", "name a folder")
        folder.mkdir(parents=True, exist_ok=True)
    with _alone(options.work), (out / LOG).open("a", encoding="utf-8") as log, _stoppable():
        session = _Session(options, out.resolve(), [path.resolve() for path in resume or []], _Tell(log), commit)
        left = began + deadline - time.time() - _CLOSING_S if deadline else float("inf")
        code = session.run(time.monotonic() + left)
    raise typer.Exit(code)


class _Session:
    """One start."""

    def __init__(self, options: Options, out: Path, earlier: list[Path], tell: _Tell, commit: str | None) -> None:
        self._options, self._out, self._tell = options, out, tell
        self._parts = parts(options)
        self._caches = caches.folders(options.work)
        orphans = machine.end_orphans(options.work)
        if orphans:
            machine.wait_until_free(0)
        device = machine.describe()
        self._used_mib = device.get("gpu_memory_used_mib")
        if not options.is_dry and device["gpu"] is None:
            raise UnsupportedError(
                "no NVIDIA GPU can be seen: nvidia-smi names none",
                "try `--dry` here, and run this beside a CUDA build of vLLM",
            )
        versions = {**report.versions("triton", "transformers"), "source": source.of_this_process()}
        versions["commit"] = commit or versions["commit"]
        # the digest stands for it: a commit changes with every word of the documentation
        identity = {name: value for name, value in versions.items() if name != "commit"} | {"gpu": device["gpu"]}
        head = {
            "bench": "gpu first hour",
            "is_dry": options.is_dry,
            "host": {**report.host(), **device},
            "versions": versions,
            "command": shlex.join(["bench/gpu/first_hour.sh", *sys.argv[1:]]),
        }
        kept = options.work / "record"
        kept.mkdir(exist_ok=True)
        self._record = Record([out, kept], earlier, identity, head)
        for text in [f"ended process {pid}, left by an earlier start" for pid in orphans] + machine.strangers():
            self._note(text)
        for folder in (*earlier, out):
            if count := caches.unpack(self._caches, folder):
                tell(f"{count} files from caches in {folder}")
        # as it was when it was packed last
        self._packed = caches.state(self._caches) if caches.is_packed(self._caches, out) else None

    def run(self, until: float) -> int:
        """All that there is time for; the exit status."""
        environment = {**os.environ, **caches.environment(self._options.work)}
        walk = Walk(
            self._record,
            until=until,
            environment=machine.marked(environment, self._options.work),
            log=self._out / LOG,
            say=self._tell,
            after_child=self._keep_logs,
            after_part=self._free_and_pack,
        )
        code = 0
        try:
            walk.run(self._parts)
            # of what an earlier start has compiled, too: the next one may know this folder alone
            self._pack()
        except Stopped as stopped:
            code = 128 + stopped.args[0]
            self._note(f"stopped by {signal.Signals(stopped.args[0]).name}")
        finally:
            self._record.write()
            rows = self._record.rows(self._parts)
            console = Console(file=self._tell, width=150, force_terminal=False)
            show.everything(console, self._options, self._parts, rows, self._record.notes)
            self._tell(f"results: {self._record.path}")
        return code or self._status()

    def _status(self) -> int:
        rows = [self._record.row(part, task) for part in self._parts for task in part.tasks]
        if any(row.may_begin for row in rows):
            return UNFINISHED
        return WRONG if any(row.is_right is False or row.state != "done" for row in rows) else 0

    def _keep_logs(self) -> None:
        """The engines' logs end with the machine; their last lines do not."""
        for path in sorted((self._options.work / LOGS).glob("*.log")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            self._tell.log.write("\n".join([f"--- {path.name}, its end", *lines, ""]))
            self._tell.log.flush()
            path.unlink()

    def _free_and_pack(self) -> None:
        """The device's memory is back, and what was compiled is kept."""
        if not self._options.is_dry and (held := machine.wait_until_free(self._used_mib)):
            self._note(held)
        self._pack()

    def _pack(self) -> None:
        built = caches.state(self._caches)
        if built != self._packed:
            begin = time.monotonic()
            for note in caches.pack(self._caches, self._out):
                self._note(note)
            self._packed = built
            self._tell(f"packed the caches in {time.monotonic() - begin:.1f} s")

    def _note(self, text: str) -> None:
        self._tell(text)
        self._record.notes.append(text)


class _Tell(io.TextIOBase):
    """What is said goes to standard output as it comes, and into the log; a file, for the console."""

    def __init__(self, log: Any) -> None:
        self.log = log
        self._begin = time.monotonic()

    def __call__(self, text: str) -> None:
        self.write(f"[{time.monotonic() - self._begin:5.0f} s] {text}\n")

    def write(self, text: str) -> int:
        for place in (sys.stdout, self.log):
            # nobody may read any more, and the results still count
            with contextlib.suppress(OSError):
                place.write(text)
                place.flush()
        return len(text)


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Hold the folder: two starts at once would measure each other, and end each other's processes as orphans.

    Raises:
        UnsupportedError: another start holds it.
    """
    with (work / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnsupportedError(
                f"another start works in `{work}`", "wait for its end, or name another folder with `--work`"
            ) from None
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
