"""`specrollout report`: a recorded rollout in; a page for a browser, or tracks for Perfetto. Needs no engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from vllm_specrollout.cli import flags
from vllm_specrollout.config.places import new_file
from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.replay.files import read_trace
from vllm_specrollout.report.page import MOST_MB, page_of
from vllm_specrollout.report.perfetto import trace_events


def report_command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A recorded rollout.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Write the page to this file.", show_default=False)] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write tracks for ui.perfetto.dev to this file.", show_default=False)
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A model's folder: the page then shows its tokens' text.", show_default=False)
    ] = None,
    most_mb: Annotated[
        int, typer.Option(help="Most megabytes of the page; what does not fit is left out, trees first.")
    ] = MOST_MB,
) -> None:
    """Draw a recorded rollout: one HTML page without a network, and tracks for Perfetto."""
    if out is None and perfetto is None:
        raise ConfigError("neither `--out` nor `--perfetto` is given", "name a file, for example `--out rollout.html`")
    flags.in_range(most_mb, "--most-mb", 1, 1000)
    for path, flag in ((out, "--out"), (perfetto, "--perfetto")):
        flags.check_writable(path, flag)
    text_of = None if tokenizer is None else _texts(tokenizer)
    recorded = read_trace(trace)
    if out is not None:
        _write(out, "--out", page_of(recorded, trace.name, most_mb * 1_000_000, text_of).encode())
    if perfetto is not None:
        _write(perfetto, "--perfetto", msgspec.json.encode(trace_events(recorded)))


def _texts(folder: Path) -> Callable[[int], str]:
    """What gives a token's text."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise UnsupportedError("`--tokenizer` needs `tokenizers`, which is not installed", "leave it out") from None
    path = folder / "tokenizer.json"
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        cause = f"`--tokenizer` is `{folder}`, whose tokenizer.json cannot be read: {error!s:.200}"
        raise ConfigError(cause, "name the folder of the recorded model") from None
    return lambda token: found.decode([token], skip_special_tokens=False)


def _write(path: Path, flag: str, content: bytes) -> None:
    """For its owner alone, as the trace is: it holds the same tokens."""
    try:
        with new_file(path) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"`{flag}` is `{path}`, which cannot be written: {error.strerror}", "name another") from None
    typer.echo(f"wrote {path} ({len(content) / 1e6:.1f} MB)")
