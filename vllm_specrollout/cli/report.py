"""`specrollout report`: a recorded rollout in; a page for a browser, or tracks for Perfetto. Needs no engine."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from vllm_specrollout.cli import fetch, flags
from vllm_specrollout.config.places import new_file
from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.replay.files import read_trace
from vllm_specrollout.report.page import MOST_MB, page_of
from vllm_specrollout.report.perfetto import trace_events

ROUTE = "/spec_rollout/rollout"
_MOST_BYTES = 4 << 30
_SECONDS = 3600.0
_SERVED = (
    'serve with VLLM_PLUGINS=spec_rollout and --spec-rollout \'{"record": "FILE"}\'; a key belongs in VLLM_API_KEY'
)


def report_command(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help="A recorded rollout, or the URL of a server that records.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write the page to this file; default: beside the trace.", show_default=False)
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write tracks for ui.perfetto.dev to this file.", show_default=False)
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A model's folder: the page then shows its tokens' text.", show_default=False)
    ] = None,
    most_mb: Annotated[
        int, typer.Option(help="Most megabytes of the page; what does not fit is left out, trees first.")
    ] = MOST_MB,
    is_opened: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open the page; default: where a screen is.", show_default=False),
    ] = None,
) -> None:
    """Draw a recorded rollout: one HTML page without a network, and tracks for Perfetto."""
    if not _is_address(trace) and not Path(trace).exists():
        raise ConfigError(
            f"`{trace}` cannot be read: No such file or directory",
            "name an existing trace, or the address of a server that records",
        )
    if out is None and perfetto is None:
        out = _beside(trace)
    flags.in_range(most_mb, "--most-mb", 1, 1000)
    for path, flag in ((out, "--out"), (perfetto, "--perfetto")):
        flags.check_writable(path, flag)
    text_of = None if tokenizer is None else _texts(tokenizer)
    with _local(trace) as path:
        recorded = read_trace(path)
    if out is not None:
        _write(
            out, "--out", page_of(recorded, trace.rpartition("/")[2] or trace, most_mb * 1_000_000, text_of).encode()
        )
        typer.echo(out.absolute().as_uri())
        if _has_screen() if is_opened is None else is_opened:
            webbrowser.open(out.absolute().as_uri())
    if perfetto is not None:
        _write(perfetto, "--perfetto", msgspec.json.encode(trace_events(recorded)))


@contextmanager
def _local(trace: str) -> Iterator[Path]:
    """The file, or what a server has recorded so far, while it is read."""
    if not _is_address(trace):
        yield Path(trace)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        with path.open("wb") as file:
            headers = fetch.fetch(trace, ROUTE, file, "gives no recording", _SERVED, _MOST_BYTES, _SECONDS)
        # its ending says how it is packed
        suffix = Path(headers.get_filename() or "").suffix
        yield path.rename(path.with_suffix(suffix)) if suffix[1:].isalnum() else path


def _beside(trace: str) -> Path:
    """`rollout.html` of `rollout.jsonl.zst`; of a server's, in the folder at hand."""
    path = Path("rollout" if _is_address(trace) else trace)
    return path.with_name(f"{path.name.partition('.')[0] or 'rollout'}.html")


def _has_screen() -> bool:
    """Whether somebody sits here: a browser for a terminal would take the terminal."""
    return _is_terminal() and bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _is_address(trace: str) -> bool:
    return trace.startswith(("http://", "https://"))


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
        raise ConfigError(
            f"`--tokenizer` is `{folder}`, whose tokenizer.json cannot be read: {error!s:.200}",
            "name the folder of the recorded model",
        ) from None
    return lambda token: found.decode([token], skip_special_tokens=False)


def _write(path: Path, flag: str, content: bytes) -> None:
    """For its owner alone, as the trace is: it holds the same tokens."""
    try:
        with new_file(path) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"`{flag}` is `{path}`, which cannot be written: {error.strerror}", "name another") from None
    typer.echo(f"wrote {path} ({len(content) / 1e6:.1f} MB)")
