"""The stream of training batches: demonstrations drawn on the fly, batched by length.

May enter: tasks, tokenizer, torch tensors. May not: the model.

Demonstrations of similar length share a batch, so little of it is padding, every answer starts at position 0 of its
own row, and no answer attends to another. (Packing several into one row would need a block mask, slow on CPU.)
"""

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .reward import draw_problems
from .tasks import FAMILIES, demonstrate
from .tokenizer import prompt_text
from .vocabulary import END

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

IGNORED = -100
"""Label of positions without loss: prompts and padding."""
_POOL = 1024
"""Demonstrations drawn and sorted at a time."""
# From each share of the run on, the largest number of terms: short problems first, they teach the sums fastest.
_CURRICULUM = ((0.0, 8), (0.35, 16), (0.55, 64))


def max_terms_at(progress: float) -> int:
    """The curriculum's limit when `progress` (0..1) of the run is done."""
    return [limit for start, limit in _CURRICULUM if progress >= start][-1]


def batches(
    tokenizer: "PreTrainedTokenizerFast", *, seed: int, steps: int, tokens: int
) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
    """`steps` batches (token ids, labels), both int64 [rows, length], rows * length near `tokens`; same by seed."""
    done = 0
    while done < steps:
        rng = random.Random(f"demonstrations/{seed}/{done}")
        pool = _draw_pool(tokenizer, rng, max_terms_at(done / steps))
        for rows in _cut(pool, tokens, rng)[: steps - done]:
            done += 1
            yield _pad(rows, tokenizer.pad_token_id)


def _draw_pool(
    tokenizer: "PreTrainedTokenizerFast", rng: random.Random, max_terms: int
) -> list[tuple[list[int], list[int]]]:
    """`_POOL` demonstrations as (prompt ids, answer ids with the end token), half of each family."""
    prompts, answers = [], []
    for family in FAMILIES:
        stream = draw_problems(rng, family, "train", "sft", max_terms=max_terms)
        for _ in range(_POOL // len(FAMILIES)):
            problem = next(stream)
            prompts.append(prompt_text(problem.prompt))
            answers.append(demonstrate(problem, rng) + END)
    return list(zip(tokenizer(prompts)["input_ids"], tokenizer(answers)["input_ids"], strict=True))


def _cut(pool: list, tokens: int, rng: random.Random) -> list[list]:
    """Sorts by length, cuts into batches of at most `tokens` padded tokens (one row at least), shuffles them."""
    groups: list[list] = []
    for row in sorted(pool, key=lambda row: len(row[0]) + len(row[1])):
        length = len(row[0]) + len(row[1])
        if groups and length * (len(groups[-1]) + 1) <= tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    rng.shuffle(groups)
    return groups


def _pad(rows: list[tuple[list[int], list[int]]], pad_id: int) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Rows of (prompt, answer) as right-padded ids and labels, int64 [rows, longest]."""
    import torch

    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), longest), pad_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return ids, labels
