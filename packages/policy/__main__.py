"""Command line: `python -m vllm_specrollout.bench.policy train | inflate | random`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn
from vllm_specrollout.bench.runner.display import Display, main

from . import CHECKPOINT
from .inflate import inflate as inflate_policy
from .inflate import inflate_head
from .random_model import make_random_model
from .train import TrainConfig
from .train import train as train_policy

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The small real policy that the benchmarks run.")
console = Console()


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder to write the checkpoint into.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and demonstrations.")] = TrainConfig.seed,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = TrainConfig.steps,
) -> None:
    """Train the policy."""
    columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.4f}"))
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("training", loss=float("nan"))
        facts = train_policy(
            TrainConfig(seed=seed, steps=steps),
            out,
            lambda step, of, loss: bars.update(bar, completed=step, total=of, loss=loss),
        )
    (out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    console.print(f"wrote {out}: {facts['parameters']} parameters")


@app.command()
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
    with Display() as display:
        bar = display.counter(f"random {arch} {size}")
        path = make_random_model(out, arch, size, seed, dtype, vocab_size, sliding_window, on_weight=bar)
    console.print(f"wrote {path}")


@app.command()
def inflate(
    out: Annotated[Path, typer.Option(help="Folder to write the model into.")],
    to: Annotated[str, typer.Option(help="30M, 150M, 400M or 7B parameters, embeddings not counted.")] = "150M",
    source: Annotated[Path, typer.Option("--from", help="Qwen3 checkpoint to inflate.")] = CHECKPOINT,
) -> None:
    """Write a model with the same tokens as the policy at the cost of a larger one."""
    with Display() as display:
        path = inflate_policy(source, out, to, display.counter(f"inflating to {to}"))
    console.print(f"wrote {path}")


@app.command("inflate-head")
def inflate_a_head(
    head: Annotated[Path, typer.Option(help="EAGLE-3 head of the policy, as `specrollout train-head` wrote it.")],
    target: Annotated[Path, typer.Option(help="The inflated policy.")],
    out: Annotated[Path, typer.Option(help="Folder to write the head into.")],
) -> None:
    """Write a head with the same drafts for an inflated policy."""
    console.print(f"wrote {inflate_head(head, target, out)}")


if __name__ == "__main__":
    main(app)
