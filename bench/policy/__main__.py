"""Command line: `python -m bench.policy train | distil | inflate | random | stats`."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

from ..runner.display import Display, main
from . import CHECKPOINT
from .evaluate import evaluate
from .inflate import inflate as inflate_policy
from .inflate import inflate_head
from .random_model import make_random_model
from .train import DistilConfig, TrainConfig
from .train import distil as distil_policy
from .train import train as train_policy

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The small real policy that the benchmarks run.")
console = Console()


@contextmanager
def _progress(title: str, loss: str) -> Iterator[Callable[[int, int, float], None]]:
    """Told step, number of steps and the loss."""
    with Progress(
        *Progress.get_default_columns(), TextColumn(loss + " {task.fields[loss]:.4f}"), console=console
    ) as bars:
        bar = bars.add_task(title, loss=float("nan"))
        yield lambda step, of, value: bars.update(bar, completed=step, total=of, loss=value)


def _write(out: Path, facts: dict[str, Any]) -> None:
    (out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    console.print(f"wrote {out}: {facts['parameters']} parameters")


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder to write the checkpoint into.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and demonstrations.")] = TrainConfig.seed,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = TrainConfig.steps,
) -> None:
    """Train the policy."""
    config = TrainConfig(seed=seed, steps=steps)
    with _progress("training", "loss") as told:
        _write(out, train_policy(config, out, told))


@app.command()
def distil(
    data: Annotated[Path, typer.Option(help="Buffer of the policy's rollouts: `collect.dir` of an engine.")],
    out: Annotated[Path, typer.Option(help="Folder to write the draft model into.")],
    policy: Annotated[Path, typer.Option(help="The policy that rolled out.")] = CHECKPOINT,
    seed: Annotated[int, typer.Option(help="Seed of weights and order.")] = DistilConfig.seed,
    epochs: Annotated[int, typer.Option(help="Passes over the buffer.")] = DistilConfig.epochs,
) -> None:
    """Train a draft model of a quarter of the policy's size on the policy's own distributions."""
    config = DistilConfig(seed=seed, epochs=epochs)
    with _progress("distilling", "KL, nats per token") as told:
        _write(out, distil_policy(config, policy, data, out, told))


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
    to: Annotated[str, typer.Option(help="30M, 150M or 400M parameters, embeddings not counted.")] = "150M",
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


@app.command()
def stats(
    model: Annotated[Path, typer.Option(help="Checkpoint to sample from.")] = CHECKPOINT,
    problems: Annotated[int, typer.Option(help="Held-out problems, half of each family.", min=2)] = 240,
    samples: Annotated[int, typer.Option(help="Answers to each problem.", min=2)] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the problems and of sampling.")] = 0,
    write: Annotated[bool, typer.Option(help="Also write the figures into the checkpoint's training.json.")] = False,
) -> None:
    """Sample held-out problems in stock vLLM; print accuracy, lengths and repeat rates."""
    figures = evaluate(model, problems, samples, seed)
    table = Table("figure", *figures)
    for name in figures["all"]:
        table.add_row(name, *(str(column[name]) for column in figures.values()))
    console.print(table)
    if write:
        path = model / "training.json"
        facts = json.loads(path.read_text()) if path.exists() else {}
        config = {"num_problems": problems, "samples": samples, "seed": seed}
        facts["evaluation"] = {"vllm": version("vllm"), "config": config, **figures}
        path.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main(app)
