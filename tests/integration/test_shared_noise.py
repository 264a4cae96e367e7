"""A draft token and the target's token meet more often than the bound says, since they share their noise."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_specrollout.trees.tape import SeedTape
from vllm_specrollout.worker.v1.sampler import SeedNoise

PAIRS, VOCAB = 10_000, 64


def entry(draw: Callable[[int], np.ndarray]) -> SimpleNamespace:
    """A request whose noise comes from these integers."""
    return SimpleNamespace(tape=SeedTape(draw))


def pairs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """[PAIRS, VOCAB] distributions from peaked to flat, and others from close by to far away."""
    sharpness = rng.uniform(0.2, 4.0, (PAIRS, 1))
    target = rng.normal(size=(PAIRS, VOCAB)) * sharpness
    draft = target + rng.normal(size=(PAIRS, VOCAB)) * rng.uniform(0.0, 2.0, (PAIRS, 1))
    return tuple(np.exp(x - x.max(1, keepdims=True)) / np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)
                 for x in (target, draft))  # type: ignore[return-value]  # fmt: skip


def chosen(distribution: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    noise = SeedNoise("raw_logprobs")
    logits = torch.from_numpy(np.log(np.maximum(distribution, 1e-30)).astype(np.float32))
    tokens = torch.arange(VOCAB).expand(len(seeds), -1)
    entries = [entry(lambda count, own=own: np.full(count, own)) for own in seeds.tolist()]
    return (logits + noise.ahead(tokens, entries, 0)).argmax(dim=1).numpy()  # type: ignore[arg-type]


def expected(target: np.ndarray, draft: np.ndarray, own: Any = slice(None)) -> tuple[float, float]:
    """How many of these pairs are met by their bounds, and four standard deviations of that."""
    distance = 0.5 * np.abs(target - draft).sum(axis=1)[own]
    bound = (1.0 - distance) / (1.0 + distance)
    return bound.sum(), 4.0 * np.sqrt((bound * (1.0 - bound)).sum())


def test_over_many_pairs_drafts_are_met_at_least_as_often_as_the_bound() -> None:
    rng = np.random.default_rng(1)
    target, draft = pairs(rng)
    seeds = rng.integers(0, 2**31, PAIRS)
    met = chosen(target, seeds) == chosen(draft, seeds)
    distance = 0.5 * np.abs(target - draft).sum(axis=1)
    for low, high in ((0.0, 1.0), (0.0, 0.2), (0.2, 0.4), (0.4, 0.7)):
        own = (distance >= low) & (distance < high)
        bound, margin = expected(target, draft, own)
        assert own.sum() > 200 and met[own].sum() >= bound - margin


def test_without_shared_noise_the_bound_does_not_hold() -> None:
    """The test above can fail: two tokens drawn each by itself meet less often."""
    rng = np.random.default_rng(2)
    target, draft = pairs(rng)
    met = chosen(target, rng.integers(0, 2**31, PAIRS)) == chosen(draft, rng.integers(0, 2**31, PAIRS))
    bound, margin = expected(target, draft)
    assert met.sum() < bound - margin


def test_the_noise_so_far_ahead_is_what_the_sampler_will_choose_with() -> None:
    rng = np.random.default_rng(4)
    seeds = rng.integers(0, 2**31, 500)
    logits = torch.from_numpy(rng.normal(size=(500, VOCAB)).astype(np.float32) * 2)
    tapes = [entry(lambda count, own=own: np.arange(own, own + count)) for own in seeds.tolist()]
    noise = SeedNoise("raw_logprobs")
    tokens = torch.from_numpy(rng.permuted(np.tile(np.arange(VOCAB), (500, 1)), axis=1))
    for depth in (0, 3):
        scores = logits.gather(1, tokens) + noise.ahead(tokens, tapes, depth)  # type: ignore[arg-type]
        met = tokens.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
        sampled = torch.ops._C.fused_gumbel_argmax(logits, torch.from_numpy(seeds + depth))
        assert torch.equal(met, sampled.to(torch.int64))
