"""`specrollout train-head`: a head from a file of prompts and answers, in one command."""

from __future__ import annotations

import importlib.util
import json as json_module
import shutil
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_specrollout.cli.prompts import Tokenizer
from vllm_specrollout.config.checks import check_choice, check_range
from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.replay.dump import Encode
from vllm_specrollout.training.spot import WORTH

MOST_ROWS = 1 << 30
"""Between two judgements."""


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
    learner = {
        **{"width": window, "batch_rows": batch_rows, "passes": passes, "loss": loss, "dtype": dtype, "seed": seed},
        **{"feature_weight": feature_weight, **({"rate": rate} if rate else {})},
    }
    _check_learner(method, levels, draft_vocab, judge_rows, learner)
    further = {"method": method, "num_levels": levels, "judge_rows": judge_rows, "memory_gib": memory_gib}
    training = _begun(target, answers, out, start, draft_vocab, learner=learner, **further)
    said = _trained(training, out, is_quiet=json)
    _tell(out, start, said, len(training.done), levels, is_json=json)


def _begun(target: Path, answers: Path, out: Path, start: Path | None, draft_vocab: int, **asked: Any) -> Any:
    """A training, with its first head."""
    from transformers import AutoConfig

    from vllm_specrollout.server.by_hand import HandTraining
    from vllm_specrollout.training.heads import frequent_tokens
    from vllm_specrollout.training.parent import Duty
    from vllm_specrollout.training.process import make_head

    config, first = AutoConfig.from_pretrained(str(target)), out / "0"
    shape = getattr(config, "text_config", config)
    duty = Duty(target=str(target), dir=str(out), head=str(start or first), is_new=start is None, **asked)
    training = HandTraining(duty, answers, _encoder(target), shape)
    if start is None and not (first / "config.json").exists():
        drafted = frequent_tokens(training.waiting, shape.vocab_size, draft_vocab) if draft_vocab else None
        make_head(target, first, duty.method, duty.num_levels, drafted, duty.learner["seed"])
    return training


def _encoder(target: Path) -> Encode:
    """The tokenizer is loaded once there is a text."""
    tokenizer = cache(Tokenizer)
    return lambda text, is_prompt: tokenizer(str(target)).encode(text, is_prompt)


def _check_learner(method: str, levels: int, draft_vocab: int, judge_rows: int, learner: dict[str, Any]) -> None:
    """Raises: ConfigError, a value that the trainer cannot have."""
    from vllm_specrollout.training.learner import NEW_RATE, LearnerConfig

    check_choice("method", method, ("eagle3", "eagle"))
    LearnerConfig(**{"rate": NEW_RATE, "num_levels": levels, **learner})
    # after each step at most: a judgement takes as long as some
    check_range("judge_rows", judge_rows, learner["batch_rows"], MOST_ROWS)
    if method == "eagle" and draft_vocab:
        raise ConfigError(
            f"`draft_vocab` is {draft_vocab}, and an `eagle` head has its target's output head",
            "leave `draft_vocab` out, or train an `eagle3` head",
        )


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


def _trained(training: Any, out: Path, *, is_quiet: bool) -> Any:
    """What the trainer said last; the head is the run's."""
    from rich.console import Console

    from vllm_specrollout.training.parent import numbers_in

    number = max(numbers_in(out), default=0) + 1
    with Console(stderr=True, quiet=is_quiet).status("computing hidden states") as status:
        said = training.train(
            number, lambda said: status.update(f"{said.answers} answers, {said.rows} rows, {said.steps} steps")
        )
    for name in ("model.safetensors", "config.json"):
        # config.json last: with it, the folder is a head
        (out / str(number) / name).replace(out / name)
    shutil.rmtree(out / str(number))
    return said


def _tell(out: Path, start: Path | None, said: Any, answers: int, levels: int, *, is_json: bool) -> None:
    # where nothing was better, the head is the one that it was
    is_useful = (accepted := max(said.own, said.serving)) >= WORTH * levels
    if is_json:
        found = {
            **{"head": str(out), "answers": answers, "rows": said.rows, "steps": said.steps, "judged": said.judged},
            **{"levels": levels, "accepted": accepted, "before": said.serving, "is_useful": is_useful},
        }
        typer.echo(json_module.dumps(found))
        return
    typer.echo(
        f"head: {out}, of {answers} answers, {said.rows} rows in {said.steps} steps\n"
        f"{said.judged} rows held out: {accepted:.2f} of {levels} drafts accepted, before {said.serving:.2f}"
    )
    if start is not None and said.own <= said.serving:
        typer.echo(f"the answers taught `{start}` nothing: the head is the one that it was")
    if not is_useful:
        typer.echo(
            f"this head is not worth having: from {WORTH * levels:.1f} accepted tokens on, drafts pay for their"
            " passes\n\nhint: it needs more answers, each is learned from three times at most; with some 130,000 rows"
            " a small policy's head gets there"
        )
