"""Proving floating-point ties: see docs/concepts/exactness.md.

Where ours first differs from stock, the two candidate tokens must be level within the dtype's rounding: each is the
argmax of logit / T + noise, and stock's own logits on the common prefix, with the noise of that position, must put them
less than the tolerance apart. The noise kernel is a black box, so the distance is found by bisection: how much must be
added to the losing candidate's logit before the kernel picks it?
"""

from __future__ import annotations

import torch
from vllm import LLM, SamplingParams

from tests.e2e.identity.cases import Case

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}


def gap(stock: LLM, case: Case, prefix: list[int], stock_token: int, our_token: int) -> float:
    """How far apart the two candidates are after `prefix`, in units of logit / T; infinity if it cannot be told.

    Only temperature, seed and greedy are undone here; a difference under any other feature counts as unproven.
    """
    plain = {"temperature", "seed", "max_tokens", "ignore_eos", "logprobs", "min_tokens"}
    if set(case.params) - plain:
        return float("inf")
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1)
    prompt = {"prompt_token_ids": case.prompt + prefix}
    found = stock.generate([prompt], [params], use_tqdm=False)[0].outputs[0].logprobs[0]
    temperature = case.params.get("temperature", 1.0) or 1.0
    scores = torch.full((1, max(found) + 1), float("-inf"))
    for token in (stock_token, our_token):
        scores[0, token] = found[token].logprob / temperature
    if case.params.get("temperature", 1.0) == 0.0:
        return float(scores[0, stock_token] - scores[0, our_token])
    generator = torch.Generator().manual_seed(case.params["seed"])
    noise_seed = torch.randint(0, 2**31, (len(prefix) + 1,), generator=generator, dtype=torch.long)[-1:]

    def stock_wins(added: float) -> bool:
        trial = scores.clone()
        trial[0, our_token] += added
        return int(torch.ops._C.fused_gumbel_argmax(trial, noise_seed)) == stock_token

    low, high = -1.0, 1.0
    if not stock_wins(low) or stock_wins(high):
        return float("inf")
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if stock_wins(middle) else (low, middle)
    return abs(high)
