"""`specrollout history`: what the `history` drafter keeps, seen and handled from outside."""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.history import upkeep

app = typer.Typer(
    help="Look into, merge, trim or remove kept answers; serve them to engines on several nodes.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_NICE = 19
"""Of an archive's process. At the usual 0, sharing two cores with an engine, a restart a second took the p99 of the
engine's steps from 71 to 109 ms; now it takes it nowhere (66 and 67 ms)."""

_DESCRIPTORS, _MOST_RUNS = 16384, 16

Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH", help="History files, or folders of them.", show_default=False)
]


@app.callback()
def _history() -> None:
    """Answers that the `history` drafter keeps in `history.dir`. Needs neither vLLM nor a GPU."""


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """A disk's refusal, worded like every other error."""
    try:
        yield
    except OSError as error:
        raise UnsupportedError(
            f"`{path}` cannot be written: {error.strerror or error}",
            "free space, or see to the directory's permissions",
        ) from None


@app.command("inspect")
def inspect_files(paths: Paths, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what each file holds, and whether anything in it is damaged. Engines may go on writing."""
    rows = [dataclasses.asdict(upkeep.inspect(path)) for path in upkeep.find(paths)]
    for folder in [] if json else filter(upkeep.is_archive, paths):
        own = [int(row["answers"]) for row in rows if Path(row["path"]).parent == folder]
        typer.echo(f"{folder}: an archive of {sum(own)} answers, from {len(own)} files of its nodes\n")
    if json:
        typer.echo(json_module.dumps({"files": rows}, indent=2))
        return
    for row in rows:
        typer.echo(_as_text(row))


def _as_text(row: dict[str, object]) -> str:
    lines = [f"{row.pop('path')}"]
    for name, value in row.items():
        if isinstance(value, float):
            shown = f"{value:.2f}"
        elif value is None:
            shown = "-"
        else:
            shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
        lines.append(f"  {name.replace('_', ' '):<18}{shown}")
    return "\n".join(lines) + "\n"


@app.command()
def merge(
    paths: Paths, into: Annotated[Path, typer.Option(help="The new file, *.history.", show_default=False)]
) -> None:
    """Write the answers of several files into a new one, once each. The old ones stay."""
    sources = upkeep.find(paths)
    with _disk_errors(into):
        count = upkeep.merge(sources, into)
    typer.echo(f"{count} answers of {len(sources)} files: {into}")


@app.command()
def trim(
    paths: Paths,
    epochs: Annotated[int, typer.Option(min=0, help="How many of the last epochs to keep.", show_default=False)],
) -> None:
    """Drop the answers of all but the last epochs. Refused while an engine writes one of the files."""
    with _disk_errors(paths[0]):
        changed = upkeep.trim(upkeep.find(paths), epochs)
    for path, (before, after) in changed.items():
        typer.echo(f"{path}: {before} answers, {after} kept")


@app.command()
def clear(paths: Paths, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Remove the files. Refused while an engine writes one of them."""
    found = upkeep.find(paths)
    if not yes:
        typer.confirm(f"Remove {len(found)} history files ({', '.join(map(str, found))})?", abort=True)
    with _disk_errors(paths[0]):
        freed = upkeep.clear(found)
    typer.echo(f"{len(found)} files removed, {freed} bytes")


@app.command(short_help="Keep the answers of engines on several nodes.")
def serve(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where answers are kept, on a local disk.")],
    listen: Annotated[str, typer.Option(help="Where it listens: tcp://HOST:PORT or ipc://PATH.")],
    key_file: Annotated[str, typer.Option(help="Behind tcp: file with the key, made where it is not there.")] = "",
    max_mib: Annotated[int, typer.Option(min=1, max=1 << 30, help="Disk, in MiB; beyond it the oldest go.")] = 65536,
) -> None:
    """Keep the answers of engines on several nodes, and give them to all of these, until this command is stopped.

    It prints the address at which engines find it, and behind tcp the file with the key, without which nobody gets in:
    `key` in the folder, where no other is named. An engine has {"history": {"dir": FOLDER, "url": ADDRESS, "key_file":
    FILE, "run": NAME}} in `--spec-rollout`, with a folder on its own disk and a copy of that file.
    """
    # engines of this host come first: nobody's step waits for an archive
    os.nice(_NICE)
    # of mirrors and of nodes: the usual soft limit is 1024
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    from vllm_specrollout.history.archive import Archive

    is_over = threading.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda *_: is_over.set())
    with _disk_errors(folder):
        archive = Archive(folder, listen, max_mib << 20, key_file)
        typer.echo(f"keeps histories at {archive.address}")
        if archive.key_file and listen.startswith("tcp"):
            typer.echo(f"its key is in {archive.key_file}")
        for run, (count, epoch) in list(archive.mirrors.runs().items())[:_MOST_RUNS]:
            typer.echo(f"run {run}: epoch {epoch}, answers of {count} files")
        try:
            archive.serve(is_over.is_set)
        finally:
            archive.close()
