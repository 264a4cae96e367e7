"""How a stream's tokens are chosen: the drafter's own distribution, sharpened, met by the target's noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_specrollout.decoupled.stream import Choices
from vllm_specrollout.drafters.sharpness import CHOICES
from vllm_specrollout.worker.streams.step import Follow, StreamStep

_LOWEST = float("-inf")


def choices_of(logits: torch.Tensor, names: Sequence[str], counts: Sequence[int], step: StreamStep) -> list[Choices]:
    """[rows] what the drafter would have behind each row.

    Args:
        logits: [rows, vocab] of the requests, one behind another.
        counts: [requests] rows of each.
    """
    follows = [step.follow[name] for name, count in zip(names, counts, strict=True) for _ in range(count)]
    scaled = _processed(logits, follows)
    seeds = [seed for name, count in zip(names, counts, strict=True) for seed in step.follow[name].seeds[:count]]
    is_greedy = torch.tensor([seed is None for seed in seeds])
    noise = torch.tensor([seed or 0 for seed in seeds], dtype=torch.int64)

    def chosen(values: torch.Tensor, sharpness: float) -> torch.Tensor:
        """[rows] argmax(s * log q + noise); the best one of greedy requests."""
        drawn = torch.ops._C.fused_gumbel_argmax((values * sharpness).contiguous(), noise).to(torch.int64)
        return torch.where(is_greedy, values.argmax(dim=-1), drawn)

    first_s, second_s = step.sharpness
    tokens, left = [chosen(scaled, first_s)], scaled
    for _ in range(step.fan_out - 1):
        left = left.scatter(1, tokens[-1][:, None], _LOWEST)
        tokens.append(chosen(left, second_s))
    drawn = torch.stack(tokens, dim=1)
    log_q = scaled.log_softmax(dim=-1).gather(1, drawn).clamp_max(0.0)
    trials = None
    if step.is_trial:
        others = scaled.scatter(1, tokens[0][:, None], _LOWEST)
        each = [chosen(values, choice) for values in (scaled, others) for choice in CHOICES]
        trials = torch.stack([tokens[0], *each], dim=1).numpy()
    rows = zip(drawn.tolist(), log_q.tolist(), seeds, strict=True)
    return [
        Choices(own, q, None if trials is None or seed is None else trials[i]) for i, (own, q, seed) in enumerate(rows)
    ]


def _processed(logits: torch.Tensor, follows: Sequence[Follow]) -> torch.Tensor:
    """[rows, vocab] float32 logits as the requests' options make them, the highest 0."""
    # a broken drafter costs speed, never more
    scaled = torch.nan_to_num(logits.float(), nan=0.0, posinf=1e4, neginf=-1e4)
    scaled = scaled / torch.tensor([follow.temperature for follow in follows])[:, None]
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    least = [follow.min_p for follow in follows]
    if any(least):
        floors = torch.tensor([math.log(value) if value > 0.0 else _LOWEST for value in least])
        scaled = scaled.masked_fill(scaled < floors[:, None], _LOWEST)
    vocab = logits.shape[-1]
    k = torch.tensor([follow.top_k if 0 < follow.top_k < vocab else vocab for follow in follows])
    p = torch.tensor([follow.top_p for follow in follows])
    return apply_top_k_top_p(scaled, k if bool((k < vocab).any()) else None, p if bool((p < 1.0).any()) else None)
