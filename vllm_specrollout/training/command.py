"""`specrollout train-head`: trains an EAGLE head on hidden states that engines collected."""

from __future__ import annotations

import importlib.util
import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_specrollout.config.checks import check_range
from vllm_specrollout.errors import UnsupportedError


def train_head(
    target: Annotated[Path, typer.Option(help="The target's folder.", show_default=False)],
    data: Annotated[Path, typer.Option(help="The buffer: `collect.dir` of the engine.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The head's folder; the run's state is kept there.", show_default=False)],
    start: Annotated[Path | None, typer.Option(help="A head to train further; default: a new one.")] = None,
    newest_only: Annotated[bool, typer.Option("--newest-only", help="Leave out what older weights computed.")] = False,
    method: Annotated[str, typer.Option(help="eagle3, or eagle: over the last layer alone.")] = "eagle3",
    epochs: Annotated[int, typer.Option(help="Passes over the buffer.")] = 1,
    batch_tokens: Annotated[int, typer.Option(help="Tokens per optimiser step.")] = 2048,
    learning_rate: Annotated[float, typer.Option(help="The highest one.")] = 1e-3,
    levels: Annotated[int, typer.Option(help="Tokens ahead that the head is trained for.")] = 4,
    loss: Annotated[str, typer.Option(help="kl_div, ce, tv or lk_hybrid.")] = "kl_div",
    feature_weight: Annotated[float, typer.Option(help="Of the distance to hidden states; eagle only.")] = 0.1,
    draft_vocab: Annotated[int, typer.Option(help="Tokens that may be drafted, most frequent first; 0: all.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of the products: auto, bfloat16 or float32.")] = "auto",
    save_every: Annotated[int, typer.Option(help="Steps between two saved states.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the order.")] = 0,
    threads: Annotated[int, typer.Option(help="Torch threads; 0: as many as torch takes.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this file, for example curves.png.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train an EAGLE head: one small layer that drafts from the target's own hidden states.

    Three commands make a head. Roll out, and keep what the target computes:

        vllm serve TARGET --spec-rollout '{"collect": {"dir": "DATA"}}'

    Train. A run that was stopped goes on when started again:

        specrollout train-head --target TARGET --data DATA --out HEAD --plot curves.png

    Draft with it:

        vllm serve TARGET --spec-rollout --speculative-config
        '{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 4}'

    Every twentieth answer is held out. In the end it says what share of them the drafts meet.
    """
    check_range("threads", threads, 0, 4096)
    _check_installed(needs_plot=plot is not None)
    import torch

    from .run import METRICS, TrainConfig, TrainingRun

    config = TrainConfig(
        method=method,
        feature_weight=feature_weight,
        epochs=epochs,
        batch_tokens=batch_tokens,
        learning_rate=learning_rate,
        num_levels=levels,
        loss=loss,
        draft_vocab=draft_vocab,
        dtype=dtype,
        save_every=save_every,
        seed=seed,
    )
    if threads:
        torch.set_num_threads(threads)
    training = TrainingRun(target, data, out, config, start=start, newest_only=newest_only)
    measured = _run(training, is_quiet=json)
    if plot is not None:
        _draw(out / METRICS, plot)
    _tell(out, training.num_steps, measured, is_json=json)


def _check_installed(*, needs_plot: bool) -> None:
    """Raises: UnsupportedError, a library is missing."""
    for name in ("torch", "transformers", *(("matplotlib",) if needs_plot else ())):
        if importlib.util.find_spec(name) is None:
            raise UnsupportedError(
                f"`specrollout train-head` needs `{name}`, which is not installed",
                'run `pip install "vllm-specrollout[train]"`',
            )
    from transformers.utils import logging

    # its bars would cut through ours
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _tell(out: Path, num_steps: int, measured: Any, *, is_json: bool) -> None:
    if is_json:
        found = {**asdict(measured), "is_useful": measured.is_useful}
        typer.echo(json_module.dumps({"head": str(out), "steps": num_steps, **found}))
        return
    met = ", ".join(f"{share:.2f}" for share in measured.agreement)
    typer.echo(f"head: {out}\nheld-out answers: loss {measured.loss:.3f}; drafts of levels 1 to k all agree: {met};")
    typer.echo(f"that makes {measured.tokens_per_step:.2f} tokens per step at temperature 0")
    if not measured.is_useful:
        drafts, accepted = len(measured.agreement), sum(measured.agreement)
        typer.echo(
            f"this head is of no use: {accepted:.2f} of its {drafts} drafts a step would be accepted, and fewer than a"
            f" quarter are not worth their passes\n\nhint: it has learned for {num_steps} steps; give more --epochs, or"
            " fewer --batch-tokens (more steps over the same answers), or collect more answers"
        )


def _draw(metrics: Path, picture: Path) -> None:
    """Draw the loss, and how often the levels agree with the target; the picture's ending says its format."""
    from matplotlib.figure import Figure

    lines = [json_module.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [line["step"] for line in lines]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(steps, [line["loss"] for line in lines])
    left.set(xlabel="step", ylabel="loss, nats")
    for level in range(len(lines[-1]["agreement"])):
        right.plot(steps, [line["agreement"][level] for line in lines], label=f"levels 1 to {level + 1}")
    right.set(xlabel="step", ylabel="drafts that agree", ylim=(0, 1))
    right.legend(frameon=False)
    figure.savefig(picture, dpi=150)


def _run(training: Any, *, is_quiet: bool) -> Any:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    console = Console(stderr=True, quiet=is_quiet)
    buffer = training.buffer
    console.print(f"{len(buffer)} answers, {buffer.num_tokens()} tokens, {len(training.held_out)} answers held out")
    for path in buffer.damaged:
        console.print(f"left out, since damaged: {path}")
    if training.step:
        console.print(
            f"going on from step {training.step} of {training.num_steps}, over the answers that it began with"
        )
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
        task = progress.add_task("training", total=training.num_steps, completed=training.step)
        found = training.train(lambda step, loss: progress.update(task, completed=step, description=f"loss {loss:.3f}"))
    if buffer.evicted:
        console.print(
            f"passed over, since the rollout evicted them meanwhile: {len(buffer.evicted)} of {len(buffer)} answers"
        )
    return found
