"""Command line: `python -m bench.policy train | distil | inflate | random | stats`."""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

from ..runner.display import Display, main
from . import CHECKPOINT
from .inflate import inflate as inflate_policy
from .inflate import inflate_head
from .random_model import make_random_model
from .reward import problems as held_out
from .reward import reward
from .tasks import FAMILIES, Problem, repeat_rate
from .tokenizer import MAX_LEN
from .train import DistilConfig, TrainConfig
from .train import distil as distil_policy
from .train import train as train_policy

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The small real policy that the benchmarks run.")
console = Console()
_MAX_TOKENS = 1600
"""Tokens after which an answer counts as cut off."""
Group = tuple[Problem, Sequence[int], Sequence[Any]]
"""A problem, its prompt's tokens, and vLLM's answers: text without special tokens, token ids with the end token."""


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
    data: Annotated[Path, typer.Option(help="The policy's answers, as `specrollout train-head` takes them.")],
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


def evaluate(model: Path, num_problems: int, samples: int, seed: int) -> dict[str, dict[str, float]]:
    """Samples in vLLM at temperature 1; figures per family and for `all`.

    Sample j of problem i is drawn with seed * 1_000_003 + i * samples + j.
    """
    from vllm import LLM, SamplingParams

    chosen = held_out(num_problems, seed)
    engine = LLM(str(model), enforce_eager=True, max_model_len=MAX_LEN, max_num_seqs=256)
    chats = [[{"role": "user", "content": one.prompt}] for one in chosen for _ in range(samples)]
    params = [
        SamplingParams(temperature=1.0, max_tokens=_MAX_TOKENS, seed=seed * 1_000_003 + i) for i in range(len(chats))
    ]
    results = iter(engine.chat(chats, params))
    by_problem = [(problem, list(islice(results, samples))) for problem in chosen]
    groups = [(one, own[0].prompt_token_ids or (), [r.outputs[0] for r in own]) for one, own in by_problem]
    by_family = {family: [group for group in groups if group[0].family == family] for family in FAMILIES}
    return {name: summarise(own) for name, own in {**by_family, "all": groups}.items()}


def summarise(groups: Sequence[Group]) -> dict[str, float]:
    """Shares and the repeat rate are in 0..1; tokens count the end token."""
    rewards = [[reward(problem, answer.text) for answer in own] for problem, _, own in groups]
    answers = [answer for _, _, own in groups for answer in own]
    lengths = sorted(len(answer.token_ids) for answer in answers)
    repeats = [repeat_rate([answer.token_ids for answer in own], prompt_ids) for _, prompt_ids, own in groups]
    return {
        "num_answers": len(answers),
        "accuracy": round(statistics.mean(value for row in rewards for value in row), 4),
        # problems some of whose samples are right and some wrong: those that RL learns from
        "mixed_share": round(statistics.mean(0.0 < statistics.mean(row) < 1.0 for row in rewards), 4),
        "tokens_mean": round(statistics.mean(lengths), 1),
        "tokens_p50": lengths[len(lengths) // 2],
        "tokens_p90": lengths[len(lengths) * 9 // 10],
        "tokens_max": lengths[-1],
        "cut_share": round(1.0 - statistics.mean(answer.finish_reason == "stop" for answer in answers), 4),
        # with the other samples of one problem as history
        "repeat_rate": round(statistics.mean(repeats), 4),
    }


if __name__ == "__main__":
    main(app)
