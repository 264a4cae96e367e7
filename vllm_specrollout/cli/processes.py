"""`specrollout drafter | keys`: what runs beside an engine, begun by hand, and the keys between hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_specrollout.cli import flags
from vllm_specrollout.config.checks import check_range
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import MOST_NODES


def serve_drafts(
    model: Annotated[str, typer.Argument(help="The model that drafts: a folder or a name.", show_default=False)],
    listen: Annotated[str, typer.Option(help="Where verifiers find it: ipc://PATH, shm://NAME, tcp://HOST:PORT.")],
    keys: Annotated[Path | None, typer.Option(help="Directory with the keys, for tcp off this host.")] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Stay when a verifier leaves, for the next one.")] = False,
    cores: Annotated[str, typer.Option(help="CPU cores to run on, as `2,3`; default: all.")] = "",
    most_nodes: Annotated[int, typer.Option(help="Nodes of a request's tree that are looked behind, at most.")] = 16,
    engine_args: Annotated[str, typer.Option(help="Further arguments of vLLM's engine, as a JSON object.")] = "{}",
) -> None:
    """Draft for an engine elsewhere, until it ends or this command is stopped; with --stay for one after another.

    The engine has `--speculative-config` with the same model, and in `--spec-rollout` {"placement": "decoupled",
    "decoupled": {"address": ADDRESS}}. Both need one vocabulary.
    """
    from vllm_specrollout.worker.streams.process import serve

    check_range("--most-nodes", most_nodes, 1, MOST_NODES)
    names = [name for name in cores.split(",") if name]
    if not all(name.isdecimal() for name in names):
        raise ConfigError(f"`--cores` is {cores!r}", "name cores by number, as in 2,3")
    serve(
        model,
        listen,
        flags.json_object(engine_args, "--engine-args", '{"dtype": "bfloat16"}'),
        cores=[int(name) for name in names],
        keys=str(keys) if keys else None,
        most_nodes=most_nodes,
        stays=stay,
    )


def write_keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Replace keys that are there.")] = False,
) -> None:
    """Write the keys with which a verifier and a drafter on different hosts know each other.

    The end that listens (`specrollout drafter`) needs server.key_secret and client.key, the verifier client.key_secret
    and server.key. Let nobody else have a .key_secret.
    """
    from vllm_specrollout.cluster import keys

    for path in keys.write(folder, force=force):
        typer.echo(str(path))
