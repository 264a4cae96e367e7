"""Command line: `python -m bench.policy train | inflate | random | reward-demo | stats`."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .errors import PolicyError

app = typer.Typer(no_args_is_help=True, add_completion=False)
console = Console()


@app.callback()
def _group() -> None:
    """The small real policy that the benchmarks run."""


def reports_errors(command: Callable) -> Callable:
    """Turns a PolicyError into its text on stderr and exit code 2."""

    @functools.wraps(command)
    def wrapped(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
        except PolicyError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None

    return wrapped


@app.command()
@reports_errors
def random(
    out: Annotated[Path, typer.Option(help="Folder to write the model into.")],
    size: Annotated[str, typer.Option(help="1M, 3M, 30M, 150M or 400M parameters, embeddings not counted.")] = "3M",
    arch: Annotated[str, typer.Option(help="qwen3, llama or mistral (sliding window).")] = "qwen3",
    seed: Annotated[int, typer.Option(help="Equal seeds give equal weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    vocab_size: Annotated[int | None, typer.Option(help="Tokens; default: the tokenizer's.")] = None,
    sliding_window: Annotated[int | None, typer.Option(help="Window in tokens, mistral only.")] = None,
) -> None:
    """Write a model with random weights and the policy's tokenizer."""
    from .random_model import make_random_model

    with console.status(f"making a random {arch} of {size}"):
        path = make_random_model(out, arch, size, seed, dtype, vocab_size, sliding_window)
    console.print(f"wrote {path}")


if __name__ == "__main__":
    app()
