"""How far apart two candidate tokens were where two answers part: see docs/concepts/exactness.md.

Each candidate is the argmax of z + noise, z being stock's own logits on the common prefix as its sampler sees them
(after temperature, penalties, masks and all). With the noise of that position they are level within the dtype's
rounding, or the difference is no tie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import vllm.envs as envs
from vllm_specrollout.kernels.tree_verify.naive import noise32

from vllm_specrollout.patches import features

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Two tokens, and where one of them was to be chosen."""

    stock: int
    ours: int
    # of each, after the common prefix: stock's logprobs of what is sampled from
    stock_logprob: float
    our_logprob: float
    # tokens of the prompt, and of the common prefix of the answers
    num_prompt: int
    num_prefix: int
    # of the row that noise is added to
    width: int


def gap(one: Candidates, seed: int | None, temperature: float) -> float:
    """How far apart they are, noise included; infinity if it cannot be told.

    Args:
        seed: of this answer's noise; None only where nothing is drawn.
        temperature: 0: the likelier one is taken.
    """
    if temperature == 0.0:
        return abs(one.stock_logprob - one.our_logprob)
    assert seed is not None
    if envs.VLLM_USE_V2_MODEL_RUNNER:
        position = one.num_prompt + one.num_prefix - 1
        noise = noise32(seed, position, max(one.stock, one.ours) + 1)
        return float(abs(one.stock_logprob + noise[one.stock] - one.our_logprob - noise[one.ours]))
    generator = torch.Generator().manual_seed(seed)
    if features.installed().cpu_noise == "vector":
        row = torch.empty(one.width)
        for _ in range(one.num_prefix + 1):
            row.exponential_(generator=generator)
        return abs(one.stock_logprob - one.our_logprob - float(row[one.stock].log() - row[one.ours].log()))
    drawn = torch.randint(0, 2**31, (one.num_prefix + 1,), generator=generator, dtype=torch.long)[-1:]
    return _bisected(drawn, one)


def _bisected(seed: torch.Tensor, one: Candidates) -> float:
    """The noise kernel of V1 is a black box: how much must be added to the losing token before the kernel picks it?"""
    scores = torch.full((1, max(one.stock, one.ours) + 1), float("-inf"))
    scores[0, one.stock], scores[0, one.ours] = one.stock_logprob, one.our_logprob

    def stock_wins(added: float) -> bool:
        trial = scores.clone()
        trial[0, one.ours] += added
        return int(torch.ops._C.fused_gumbel_argmax(trial, seed)) == one.stock

    low, high = -1.0, 64.0
    if not stock_wins(low) or stock_wins(high):
        return float("inf")
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if stock_wins(middle) else (low, middle)
    return abs(high)
