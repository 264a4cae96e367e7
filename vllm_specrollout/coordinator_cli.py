"""`specrollout coordinator`: which idle worker of a group helps which request."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated

import typer


def coordinate(
    listen: Annotated[str, typer.Option(help="Where workers of this host find it: ipc://PATH.")],
    mode: Annotated[str, typer.Option(help="`race`: run requests twice; `attach`: lend drafters.")] = "race",
    methods: Annotated[str, typer.Option(help="Drafting methods for racing, best first.")] = "history,ngram",
    most: Annotated[int, typer.Option(help="Requests of others that one worker helps with.")] = 4,
    silence_s: Annotated[float, typer.Option(help="Seconds without a report until a worker counts as gone.")] = 10.0,
    parent: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Say which idle worker helps which request, until this command is stopped.

    A group with a ladder begins one by itself. It keeps nothing: begun anew, it learns all from the workers' reports.
    """
    from vllm_specrollout.group.coordinator import Rules
    from vllm_specrollout.group.serving import serve

    names = tuple(name.strip() for name in methods.split(",") if name.strip())
    rules = Rules(mode=mode, methods=names, most=most, silence_s=silence_s)
    with contextlib.suppress(KeyboardInterrupt):
        serve(listen, rules, lambda: bool(parent) and os.getppid() != parent)
