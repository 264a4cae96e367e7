"""Reinforcement learning of the small policy: GRPO in plain PyTorch on CPU.

All answers to one problem form a group, and an answer's advantage is its reward relative to its group's (Shao et al.,
DeepSeekMath, 2024, section 4.1). Every answer token is pushed by its answer's advantage through a clipped probability
ratio (Schulman et al., PPO, 2017, section 3); the loss is the mean over all answer tokens of a minibatch, so a token
counts the same in a long answer and in a short one (Yu et al., DAPO, 2025, section 3.3). The old log-probabilities are
the trainer's own, from one pass before the first optimiser step: those of an engine are rounded differently.
"""

import math
import random
import shutil
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

from vllm_specrollout.config.checks import Range, check_fields

if TYPE_CHECKING:
    import torch

Item = TypeVar("Item")
Tokens = tuple[Sequence[int], Sequence[int]]
"""Of a prompt, and of an answer with the end token."""
_MICRO_TOKENS = 8192
"""Padded tokens of one forward pass; bounds memory, changes nothing else."""
LEAST_ONE = Range(1, 1 << 30)
_SHARE, _SIZE = Range(0.0, 1.0), Range(0.0, math.inf)


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """All that an update depends on, besides the answers."""

    learning_rate: Annotated[float, _SIZE] = 1e-4
    # Ratios outside 1 - clip_low .. 1 + clip_high earn nothing more.
    clip_low: Annotated[float, _SHARE] = 0.2
    clip_high: Annotated[float, _SIZE] = 0.2
    # Passes over the answers of one rollout, and optimiser steps in each.
    inner_epochs: Annotated[int, LEAST_ONE] = 1
    minibatches: Annotated[int, LEAST_ONE] = 1
    # Gradient norm above which the gradient is scaled down.
    max_norm: float = 1.0
    weight_decay: Annotated[float, _SIZE] = 0.0
    # Order of answers in the minibatches.
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class AnswerGroup:
    """All answers to one problem and what they earned."""

    prompt_ids: tuple[int, ...]
    # Per sample; an answer holds one token at least.
    answers: tuple[tuple[int, ...], ...]
    # Per sample.
    rewards: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class UpdateStats:
    """What one update did; means are over the answer tokens that were learnt from."""

    # Negative objective of the first optimiser step.
    loss: float
    # Before it was scaled down, of the last optimiser step.
    grad_norm: float
    # Share of tokens whose ratio is held by the clip, over all optimiser steps, in 0..1.
    clipped_share: float
    # Share of groups whose answers all earned the same, in 0..1: nothing is learnt from them.
    flat_share: float
    optimizer_steps: int


class _Row(NamedTuple):
    """One answer in training."""

    prompt_ids: tuple[int, ...]
    answer: tuple[int, ...]
    advantage: float


class _Step(NamedTuple):
    """One optimiser step."""

    loss: float
    grad_norm: float
    num_tokens: int
    num_clipped: int


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / standard deviation over one group, dimensionless; all zero where all rewards are equal."""
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    # equal rewards leave a rounding error of the mean, which a division would blow up
    if std <= 1e-6 * max(1.0, abs(mean)):
        return [0.0] * len(rewards)
    return [(reward - mean) / std for reward in rewards]


def clipped_terms(
    log_p: "torch.Tensor", old_log_p: "torch.Tensor", advantages: "torch.Tensor", clip_low: float, clip_high: float
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """The objective of each token, to be maximised, and whether the clip holds it.

    All are [num_tokens], float32 (bool for the latter); log-probabilities are natural. Where the clip holds, the
    objective is flat: no gradient flows.
    """
    ratio = (log_p - old_log_p).exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return plain.minimum(clipped), clipped < plain


class GrpoTrainer:
    """The policy in training: float32 weights and AdamW. `update` learns from one rollout, `save` writes the weights.

    Args:
        folder: checkpoint to start from.
    """

    def __init__(self, folder: Path, config: GrpoConfig) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.config = config
        self._folder = folder
        # .eval() only turns dropout off, of which there is none; gradients flow all the same
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.99)
        )
        self._random = random.Random(config.seed)

    def update(self, groups: Sequence[AnswerGroup]) -> UpdateStats:
        """Learns from one rollout; `inner_epochs` x `minibatches` optimiser steps, none if no group has a signal."""
        rows, num_flat = self._rows(groups)
        old = self._frozen_log_probs(self.model, rows)
        steps = [
            self._step(rows, chosen, old)
            for _ in range(self.config.inner_epochs)
            for chosen in self._minibatches(len(rows))
        ]
        num_tokens = max(1, sum(step.num_tokens for step in steps))
        return UpdateStats(
            loss=steps[0].loss if steps else 0.0,
            grad_norm=steps[-1].grad_norm if steps else 0.0,
            clipped_share=sum(step.num_clipped for step in steps) / num_tokens,
            flat_share=num_flat / len(groups),
            optimizer_steps=len(steps),
        )

    def save(self, folder: Path, dtype: str = "bfloat16") -> Path:
        """Writes the present weights, rounded to `dtype`, as a checkpoint like the one training began from."""
        import torch
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: w.detach().to(getattr(torch, dtype)) for name, w in self.model.state_dict().items()}
        if self.model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        for path in self._folder.glob("*"):
            if path.suffix in (".json", ".jinja") and path.name != "training.json":
                shutil.copyfile(path, folder / path.name)
        return folder

    def _rows(self, groups: Sequence[AnswerGroup]) -> tuple[list[_Row], int]:
        """Answers to learn from, and the number of groups without a signal.

        A group without a signal has no gradient, so it is not computed at all; its tokens do not count in the mean
        either, or the step's size would depend on how many problems are solved already (DAPO's
        dynamic sampling goes further and draws other problems instead).
        """
        rows, num_flat = [], 0
        for group in groups:
            advantages = group_advantages(group.rewards)
            is_flat = not any(advantages)
            num_flat += is_flat
            if is_flat:
                continue
            rows += [_Row(group.prompt_ids, *one) for one in zip(group.answers, advantages, strict=True)]
        return rows, num_flat

    def _minibatches(self, count: int) -> list[list[int]]:
        """Indices of rows, dealt out evenly in a random order."""
        order = list(range(count))
        self._random.shuffle(order)
        parts = [order[i :: self.config.minibatches] for i in range(self.config.minibatches)]
        return [part for part in parts if part]

    def _step(self, rows: Sequence[_Row], chosen: Sequence[int], old: Sequence["torch.Tensor"]) -> _Step:
        import torch

        config = self.config
        total = sum(len(rows[i].answer) for i in chosen)
        loss_sum, num_clipped = 0.0, 0
        for part in _micro_batches(rows, chosen):
            log_p = answer_log_probs(self.model, [rows[i] for i in part])
            advantages = torch.cat([torch.full((len(rows[i].answer),), rows[i].advantage) for i in part])
            old_log_p = torch.cat([old[i] for i in part])
            terms, is_clipped = clipped_terms(log_p, old_log_p, advantages, config.clip_low, config.clip_high)
            num_clipped += int(is_clipped.sum())
            # the mean over the whole minibatch, in parts
            loss = -terms.sum() / total
            loss.backward()
            loss_sum += loss.item()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_norm))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return _Step(loss_sum, norm, total, num_clipped)

    def _frozen_log_probs(self, model: "torch.nn.Module", rows: Sequence[_Row]) -> list["torch.Tensor"]:
        """Per row, the log-probabilities of its answer's tokens, [tokens of that answer], without gradients."""
        import torch

        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for part in _micro_batches(rows, range(len(rows))):
                flat = answer_log_probs(model, [rows[i] for i in part])
                found |= zip(part, flat.split([len(rows[i].answer) for i in part]), strict=True)
        return [found[i] for i in range(len(rows))]


def answer_log_probs(model: "torch.nn.Module", rows: Sequence[_Row]) -> "torch.Tensor":
    """Natural log-probabilities of all answer tokens of these rows, float32 [num_tokens], row after row."""
    logits, targets = answer_logits(model, [(row.prompt_ids, row.answer) for row in rows])
    return logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def _micro_batches(rows: Sequence[_Row], chosen: Iterable[int]) -> list[list[int]]:
    return packed(chosen, lambda i: len(rows[i].prompt_ids) + len(rows[i].answer), _MICRO_TOKENS)


def answer_logits(model: "torch.nn.Module", rows: Sequence[Tokens]) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Logits [num_tokens, V] of all answer tokens of these rows, row after row, and the tokens, int64 [num_tokens].

    Rows are padded on the right, so causal attention alone keeps the padding out.
    """
    import torch

    wholes = [torch.tensor([*prompt, *answer]) for prompt, answer in rows]
    places = [torch.arange(len(whole)) >= len(prompt) for whole, (prompt, _) in zip(wholes, rows, strict=True)]
    ids, is_answer = (torch.nn.utils.rnn.pad_sequence(one, batch_first=True) for one in (wholes, places))
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return model.lm_head(hidden[is_answer[:, 1:]]), ids[is_answer]


def packed(rows: Iterable[Item], length: Callable[[Item], int], tokens: int) -> list[list[Item]]:
    """The rows by length, cut into batches of at most `tokens` padded tokens (one row at least)."""
    groups: list[list[Item]] = []
    for row in sorted(rows, key=length):
        if groups and length(row) * (len(groups[-1]) + 1) <= tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
