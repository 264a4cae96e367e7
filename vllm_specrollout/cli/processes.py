"""`specrollout drafter`: a model that drafts for engines elsewhere, begun by hand."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_specrollout.cli import flags
from vllm_specrollout.errors import ConfigError


def serve_drafts(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="What drafts: its folder or name.", show_default=False)],
    listen: Annotated[str, typer.Option(help="Where engines find it: ipc://PATH or tcp://HOST:PORT.")],
    key_file: Annotated[str, typer.Option(help="Behind tcp: file with the key, made where it is not there.")] = "",
    cores: Annotated[str, typer.Option(help="CPU cores to run on, as `2,3`; default: all.")] = "",
    stock: Annotated[bool, typer.Option("--stock", help="On stock vLLM's V2 runner, as on a GPU.")] = False,
    engine_args: Annotated[str, typer.Option(help="Further arguments of vLLM's engine, as a JSON object.")] = "{}",
) -> None:
    """Draft for engines elsewhere, any number of them at once, until this command is stopped.

    It prints the address at which engines find it; behind tcp nobody gets in without the key. An engine has
    `--speculative-config` with the same model, and in `--spec-rollout` {"placement": "decoupled", "decoupled":
    {"address": ADDRESS, "key_file": FILE}}. Both need one vocabulary.
    """
    from vllm_specrollout.worker.drafter_process import serve

    names = [name for name in cores.split(",") if name]
    if not all(name.isdecimal() for name in names):
        raise ConfigError(f"`--cores` is {cores!r}", "name cores by number, as in 2,3")
    serve(
        model,
        listen,
        flags.json_object(engine_args, "--engine-args", '{"dtype": "bfloat16"}'),
        cores=[int(name) for name in names],
        takes_up=not stock,
        key_file=key_file,
        ready=lambda address: typer.echo(f"drafts at {address}"),
    )
