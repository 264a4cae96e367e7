"""`specrollout keys`: the keys of a verifier and a drafter on different hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def write_keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Replace keys that are there.")] = False,
) -> None:
    """Write the keys with which a verifier and a drafter on different hosts know each other.

    The end that listens (`specrollout drafter`) needs server.key_secret and client.key, the verifier client.key_secret
    and server.key. Let nobody else have a .key_secret.
    """
    from vllm_specrollout.decoupled import keys

    for path in keys.write(folder, force=force):
        typer.echo(str(path))
