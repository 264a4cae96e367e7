"""`specrollout train-head`: a head from a file of prompts and answers, in one command."""

from __future__ import annotations

import importlib.util
import json as json_module
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_specrollout.errors import UnsupportedError


def train_head(
    target: Annotated[Path, typer.Option(help="The target's folder.", show_default=False)],
    answers: Annotated[Path, typer.Option(help="Prompts and answers, JSON lines.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The head's folder; the run's state is kept there.", show_default=False)],
    start: Annotated[Path | None, typer.Option(help="A head to train further; default: a new one.")] = None,
    method: Annotated[str, typer.Option(help="eagle3, or eagle: over the last layer alone.")] = "eagle3",
    levels: Annotated[int, typer.Option(help="Tokens ahead that the head is trained for, at least 2.")] = 6,
    passes: Annotated[int, typer.Option(help="Times that an answer is learned from, at most 3.")] = 3,
    batch_rows: Annotated[int, typer.Option(help="Rows per optimiser step.")] = 256,
    window: Annotated[int, typer.Option(help="Rows of an answer that are learned from side by side.")] = 64,
    rate: Annotated[float, typer.Option(help="Learning rate; 0: 3e-4, and 1e-3 for a new head.")] = 0.0,
    loss: Annotated[str, typer.Option(help="kl_div, rkl, ce, tv or lk_hybrid.")] = "kl_div",
    feature_weight: Annotated[float, typer.Option(help="Of the distance to hidden states; eagle only.")] = 0.1,
    draft_vocab: Annotated[int, typer.Option(help="Tokens that a new head may draft; 0: all.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of the products: auto, bfloat16 or float32.")] = "auto",
    judge_rows: Annotated[int, typer.Option(help="Rows between two judgements, which save the run.")] = 16384,
    memory_gib: Annotated[float, typer.Option(help="Hidden states in memory at a time.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the order.")] = 0,
    threads: Annotated[int, typer.Option(help="Torch threads; 0: as many as torch takes.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train an EAGLE head: one small layer that drafts from the target's own hidden states.

    Write a line for each answer of a rollout, and train:

        {"prompt_token_ids": [...], "token_ids": [...]}

        specrollout train-head --target TARGET --answers ANSWERS.jsonl --out HEAD

    Draft with it:

        vllm serve TARGET --spec-rollout --speculative-config
        '{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 10}'

    The rollout may go on and add lines. A run that was stopped goes on when started again, whatever the file holds by
    then. Every tenth answer is held out. In the end it says how many drafts would be accepted there.
    """
    _check_installed()
    from transformers import AutoConfig, AutoTokenizer

    from vllm_specrollout.server.head_rows import PrefillEngine
    from vllm_specrollout.training.answer_file import AnswerFile
    from vllm_specrollout.training.run import HeadRun, TrainConfig

    config = TrainConfig(
        method=method,
        rate=rate,
        draft_vocab=draft_vocab,
        judge_rows=judge_rows,
        memory_gib=memory_gib,
        threads=threads,
    )
    learner = {"num_levels": levels, "width": window, "batch_rows": batch_rows, "passes": passes, "loss": loss}
    learner |= {"feature_weight": feature_weight, "dtype": dtype, "seed": seed}
    shape = AutoConfig.from_pretrained(str(target))
    vocab_size = getattr(shape, "text_config", shape).vocab_size

    tokenizer = cache(lambda: AutoTokenizer.from_pretrained(str(target)))

    def encode(text: str, begins: bool) -> list[int]:
        return list(tokenizer().encode(text, add_special_tokens=begins))

    file, engine = AnswerFile(answers, encode, vocab_size), PrefillEngine()
    run = HeadRun(target, file, out, config, learner, engine, start=start)
    try:
        trained = _trained(run, is_quiet=json)
    finally:
        engine.close()
    _tell(out, start, trained, is_json=json)


def _check_installed() -> None:
    """Raises: UnsupportedError, a library is missing."""
    for name in ("torch", "transformers", "speculators"):
        if importlib.util.find_spec(name) is None:
            raise UnsupportedError(
                f"`specrollout train-head` needs `{name}`, which is not installed",
                'run `pip install "vllm-specrollout[train]"`',
            )
    from transformers.utils import logging

    # its bars would cut through ours
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _trained(run: Any, *, is_quiet: bool) -> Any:
    from rich.console import Console

    console = Console(stderr=True, quiet=is_quiet)
    if run.learner.steps:
        console.print(f"going on after {run.learner.steps} steps, with the answers that are there now")
    with console.status("computing hidden states") as status:
        return run.train(
            lambda learner, loss: status.update(f"{learner.rows} rows, {learner.steps} steps, loss {loss:.3f}")
        )


def _tell(out: Path, start: Path | None, trained: Any, *, is_json: bool) -> None:
    kept = trained.kept
    if is_json:
        found = {"head": str(out), **asdict(trained), "accepted": kept.accepted, "is_useful": trained.is_useful}
        typer.echo(json_module.dumps(found))
        return
    met = ", ".join(f"{share:.2f}" for share in kept.met)
    typer.echo(
        f"head: {out}, of {trained.answers} answers, {trained.rows} rows in {trained.steps} steps\n"
        f"{kept.rows} rows held out: drafts of levels 1 to k are all met: {met}; {kept.accepted:.2f} of"
        f" {len(kept.met)} accepted, before {trained.first.accepted:.2f}"
    )
    if start is not None and kept.accepted <= trained.first.accepted:
        typer.echo(f"the answers taught `{start}` nothing: the head is the one that it was")
    if not trained.is_useful:
        typer.echo(
            f"this head is not worth having: from {0.3 * len(kept.met):.1f} accepted tokens on, drafts pay for their"
            " passes\n\nhint: it needs more answers, each is learned from three times at most; with some 130,000 rows"
            " a small policy's head gets there"
        )
