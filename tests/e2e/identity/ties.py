"""Proving floating-point ties: see docs/concepts/exactness.md.

Where ours first differs from stock, the two candidate tokens must be level within the dtype's rounding: each is the
argmax of z + noise, z being stock's own logits on the common prefix as its sampler sees them (after temperature,
penalties, masks and all), and with the noise of that position they must be less than the tolerance apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import vllm.envs as envs
from vllm_specrollout.kernels.tree_verify.naive import noise32

from tests.e2e.identity.cases import Case
from vllm_specrollout.patches import features

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}

Judge = Callable[[Case], Any]
"""Runs one request in a stock engine whose logprobs are of every token, and of the logits that are sampled from."""

JUDGE = {"max_logprobs": -1, "logprobs_mode": "processed_logprobs"}
"""Arguments of such an engine."""


def gap(judge: Judge, case: Case, prefix: list[int], stock_token: int, our_token: int, answer: int = 0) -> float:
    """How far apart the two candidates are after `prefix`; infinity if it cannot be told.

    Args:
        judge: stock.
        case: the request; of several answers, `answer` is the one that differs.
        prefix: the tokens before.
    """
    own = {key: value for key, value in case.params.items() if key not in ("n", "prompt_logprobs", "logprob_token_ids")}
    if "seed" in own:
        own["seed"] += answer
    output = judge(replace(case, params={**own, "logprobs": -1})).outputs[0]
    if list(output.token_ids[: len(prefix)]) != prefix:
        return float("inf")
    stock, ours = (output.logprobs[len(prefix)][token].logprob for token in (stock_token, our_token))
    if own.get("temperature", 1.0) == 0.0:
        return abs(stock - ours)
    if envs.VLLM_USE_V2_MODEL_RUNNER:
        position = len(case.prompt) + len(prefix) - 1
        noise = noise32(own["seed"], position, max(stock_token, our_token) + 1)
        return abs(stock + noise[stock_token] - ours - noise[our_token])
    generator = torch.Generator().manual_seed(own["seed"])
    if features.installed().cpu_noise == "vector":
        row = torch.empty(len(output.logprobs[len(prefix)]))
        for _ in range(len(prefix) + 1):
            row.exponential_(generator=generator)
        return abs(stock - ours - float(row[stock_token].log() - row[our_token].log()))
    seed = torch.randint(0, 2**31, (len(prefix) + 1,), generator=generator, dtype=torch.long)[-1:]
    return _bisected(seed, stock_token, stock, our_token, ours)


def _bisected(seed: torch.Tensor, stock_token: int, stock: float, our_token: int, ours: float) -> float:
    """The noise kernel of V1 is a black box: how much must be added to the losing token before the kernel picks it?"""
    scores = torch.full((1, max(stock_token, our_token) + 1), float("-inf"))
    scores[0, stock_token], scores[0, our_token] = stock, ours

    def stock_wins(added: float) -> bool:
        trial = scores.clone()
        trial[0, our_token] += added
        return int(torch.ops._C.fused_gumbel_argmax(trial, seed)) == stock_token

    low, high = -1.0, 64.0
    if not stock_wins(low) or stock_wins(high):
        return float("inf")
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if stock_wins(middle) else (low, middle)
    return abs(high)
