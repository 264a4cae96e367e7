"""Command line: `python -m bench.policy train | distil | inflate | random | stats`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

from ..runner.display import Display, main
from . import CHECKPOINT
from .distil import DistilConfig
from .distil import distil as distil_policy
from .evaluate import EvalConfig, FamilyStats, as_json, evaluate
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
    config = TrainConfig(seed=seed, steps=steps)
    columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.4f}"))
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=steps, loss=float("nan"))
        facts = train_policy(config, out, lambda step, loss: progress.update(bar, completed=step + 1, loss=loss))
    (out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    console.print(f"wrote {out}")


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
    columns = (*Progress.get_default_columns(), TextColumn("KL {task.fields[loss]:.4f}"))
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("distilling", loss=float("nan"))
        facts = distil_policy(
            config, policy, data, out, lambda step, of, loss: progress.update(bar, completed=step, total=of, loss=loss)
        )
    (out / "training.json").write_text(json.dumps({"config": asdict(config), **facts}, indent=2) + "\n")
    console.print(f"wrote {out}: {facts['parameters']} parameters, KL divergence {facts['loss']:.3f} nats per token")


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
    problems: Annotated[int, typer.Option(help="Held-out problems, half of each family.")] = EvalConfig.num_problems,
    samples: Annotated[int, typer.Option(help="Answers to each problem.")] = EvalConfig.samples,
    seed: Annotated[int, typer.Option(help="Seed of the problems and of sampling.")] = EvalConfig.seed,
    write: Annotated[bool, typer.Option(help="Also write the figures into the checkpoint's training.json.")] = False,
) -> None:
    """Sample held-out problems in stock vLLM; print accuracy, lengths and repeat rates."""
    config = EvalConfig(num_problems=problems, samples=samples, seed=seed)
    figures = evaluate(model, config)
    table = Table("figure", *figures)
    for name in FamilyStats.__dataclass_fields__:
        table.add_row(name, *(str(getattr(column, name)) for column in figures.values()))
    console.print(table)
    if write:
        path = model / "training.json"
        facts = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(facts | {"evaluation": as_json(config, figures)}, indent=2) + "\n")


if __name__ == "__main__":
    main(app)
