"""Ties: how far apart two candidate tokens were where two answers part, see docs/concepts/exactness.md.

Each candidate is the argmax of z + noise, z being stock's own logits on the common prefix as its sampler sees them.
With the noise of that position they are level within the dtype's rounding, or the difference is no tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_specrollout.observe.self_check import tolerance

from .engine_process import EngineProcess
from .rows import Judged, Pair, Parting, partings

if TYPE_CHECKING:
    import torch

JUDGE: dict[str, Any] = {"max_logprobs": -1, "logprobs_mode": "processed_logits"}
"""Arguments of an engine that can tell ties: it is asked for the logits that are sampled from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TieCandidates:
    """Two tokens, and where one of them was to be chosen."""

    stock: int
    ours: int
    # of each, after the common prefix: stock's logits that noise is added to, after temperature and masks
    stock_logit: float
    our_logit: float
    # tokens of the prompt, and of the common prefix of the answers
    num_prompt: int
    num_prefix: int
    # of the row that noise is added to
    width: int
    # which model runner draws the noise; None: that of this process's environment
    is_v2: bool | None = None


def judged(one: TieCandidates, seed: int | None, temperature: float, dtype: str) -> tuple[bool, str]:
    """Whether it is a tie, and how far apart the candidates are of how much allowed, in words; see `gap`."""
    logits = [logit * (temperature or 1.0) for logit in (one.stock_logit, one.our_logit)]
    apart, most = gap(one, seed, temperature), tolerance(dtype, logits, temperature)
    return apart <= most, f"{apart:.1e} apart, {most:.1e} allowed"


def judge(
    stock: Callable[[], EngineProcess],
    prompts: Sequence[list[int]],
    params: Sequence[dict[str, Any]],
    pairs: Sequence[Pair],
    dtype: str,
    known: dict[Any, tuple[bool, str]],
    most: int | None = None,
) -> Judged:
    """Of every request whose tokens differ, whether it is where stock itself met a tie.

    Args:
        stock: the engine that is asked, started with `JUDGE`.
        params: stock's.
        known: what was asked before, which is not asked again.
        most: of the questions; what is not asked about is no proven tie.
    """
    found, count = Judged(), 0
    for pair in pairs:
        if pair.stock.itself is not None:
            found.differences.append(f"stock against itself: {pair.stock.itself.as_text('then')}")
            continue
        for one in partings(pair.stock, pair.ours):
            prompt, own, answer = prompts[one.request], params[one.request], pair.ours.token_ids[one.request]
            key = (one, answer[: one.position], tuple(prompt), own["seed"])
            if key not in known and count == most:
                is_tie, why = False, "not asked about"
            else:
                if key not in known:
                    count += 1
                    known[key] = asked(stock(), prompt, own, answer, one, dtype, is_given=True)
                is_tie, why = known[key]
            told, text = found.ties if is_tie else found.differences, f"{one.as_text()}, {why}"
            if text not in told:
                told.append(text)
    return found


def asked(
    stock: EngineProcess,
    prompt: list[int],
    params: dict[str, Any],
    answer: Sequence[int],
    parting: Parting,
    dtype: str,
    *,
    is_given: bool = False,
) -> tuple[bool, str]:
    """Whether the place where an answer parts from stock's is a tie, and why, in words; stock is asked for its logits.

    Args:
        stock: its engine, started with `JUDGE`.
        answer: ours, of the request of this prompt and these parameters.
        is_given: the prefix is given to stock, as part of the prompt. It need not repeat itself then, which among other
            requests than before it might not. Only for requests that look at no token of the answer, but for the model.
    """
    if parting.stock is None or parting.ours is None:
        return False, "where one answer ended"
    prefix = list(answer[: parting.position])
    given = prefix if is_given else []
    at, candidates = len(prefix) - len(given), [parting.stock, parting.ours]
    found = stock.ask("look", prompt=[*prompt, *given], params=params, at=at, candidates=candidates)
    if given + found["token_ids"][:at] != prefix:
        return False, "and stock does not repeat itself"
    stock_logit, our_logit = found["logits"]
    one = TieCandidates(
        stock=parting.stock,
        ours=parting.ours,
        stock_logit=stock_logit,
        our_logit=our_logit,
        num_prompt=len(prompt),
        num_prefix=len(prefix),
        width=found["width"],
        is_v2=found.get("is_v2"),
    )
    return judged(one, params["seed"], params["temperature"], dtype)


def gap(one: TieCandidates, seed: int | None, temperature: float) -> float:
    """How far apart they are, noise included; infinity if it cannot be told.

    Args:
        seed: of this answer's noise; None only where nothing is drawn.
        temperature: 0: the likelier one is taken.
    """
    if temperature == 0.0:
        return abs(one.stock_logit - one.our_logit)
    assert seed is not None
    # here, since processes that only start engines need none of it
    import torch
    import vllm.envs as envs
    from vllm_specrollout.kernels.tree_verify.naive import noise32

    from vllm_specrollout.patches import features

    if envs.VLLM_USE_V2_MODEL_RUNNER if one.is_v2 is None else one.is_v2:
        position = one.num_prompt + one.num_prefix - 1
        noise = noise32(seed, position, max(one.stock, one.ours) + 1)
        return float(abs(one.stock_logit + noise[one.stock] - one.our_logit - noise[one.ours]))
    generator = torch.Generator().manual_seed(seed)
    if features.installed().cpu_noise == "vector":
        row = torch.empty(one.width)
        for _ in range(one.num_prefix + 1):
            row.exponential_(generator=generator)
        return abs(one.stock_logit - one.our_logit - float(row[one.stock].log() - row[one.ours].log()))
    drawn = torch.randint(0, 2**31, (one.num_prefix + 1,), generator=generator, dtype=torch.long)[-1:]
    return _bisected(drawn, one)


def _bisected(seed: torch.Tensor, one: TieCandidates) -> float:
    """The noise kernel of V1 is a black box: how much must be added to the losing token before the kernel picks it?"""
    # registers the kernel, which engines elsewhere do for themselves alone
    import torch
    import vllm._custom_ops  # noqa: F401

    scores = torch.full((1, max(one.stock, one.ours) + 1), float("-inf"))
    highest = max(one.stock_logit, one.our_logit)  # the kernel was seen with logprobs, so none is above 0
    scores[0, one.stock], scores[0, one.ours] = one.stock_logit - highest, one.our_logit - highest

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
