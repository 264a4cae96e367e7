"""Answers of a simulated rollout: how long each becomes, and how well each method drafts for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from vllm_specrollout.bench.studies.formulas import Floats, Ints
from vllm_specrollout.bench.studies.report import Inputs, Number, Share

from vllm_specrollout.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All requests of one rollout."""

    # [N] tokens to generate, int
    length: Ints
    # [M, N] probability that a token drafted by method m for request n is right, when those before it are
    acceptance: Floats

    def __post_init__(self) -> None:
        if not len(self.length) or self.length.min() < 1:
            raise ConfigError("a rollout has no request, or one without tokens", "give lengths of at least 1")
        if not ((self.acceptance >= 0.0) & (self.acceptance <= 1.0)).all():
            raise ConfigError("an acceptance lies outside 0 to 1", "give probabilities")


class AnswersInputs(Inputs):
    """As SpecActor, section 5.1, has them, where its text says so."""

    # text: tokens
    longest: Number = 20000
    # free, set: answers are so many times as short
    shortened: Number = 1
    # free, fitted to 50 % of GPU time idle in plain rollout, and 64 or more running for 20 % of it (section 2.2)
    median_length: Number = 1600
    # of the logarithm, and the share of its variance that a problem's answers have in common
    length_spread: Number = 0.7
    length_shared: Share = 0.8
    # free, set: DAPO's usual group
    samples: Number = 16
    # free, set: of the logit over requests, the share of that variance common to all methods, the correlation of that
    # with the logarithm of the length (below 0, long answers are drafted worse)
    acceptance_spread: Number = 0.5
    acceptance_common: Share = 0.3
    acceptance_with_length: Annotated[float, msgspec.Meta(ge=-1.0, le=1.0)] = 0.0


def draw_answers(
    inputs: AnswersInputs, requests: int, acceptance: tuple[float, ...], seed: int, epoch: int = 0
) -> Workload:
    """Log-normal lengths, of which a problem's answers share a part; logit-normal acceptances, partly common too.

    Args:
        epoch: of the same problems; each has answers of its own.
    """
    rng = np.random.default_rng(seed)
    samples = int(inputs.samples)
    of_problem = np.repeat(rng.standard_normal(-(-requests // samples)), samples)[:requests]
    if epoch:
        rng = np.random.default_rng([seed, epoch])
    size = _mixed(of_problem, inputs.length_shared, rng)
    median, longest = inputs.median_length / inputs.shortened, int(inputs.longest / inputs.shortened)
    length = np.clip(np.rint(median * np.exp(inputs.length_spread * size)), 1, longest).astype(np.int64)
    related = inputs.acceptance_with_length
    common = related * size + np.sqrt(1.0 - related**2) * rng.standard_normal(requests)
    logits = [
        np.log(p) - np.log1p(-p) + inputs.acceptance_spread * _mixed(common, inputs.acceptance_common, rng)
        for p in acceptance
    ]
    return Workload(length=length, acceptance=1.0 / (1.0 + np.exp(-np.stack(logits))))


def _mixed(common: Floats, share: float, rng: np.random.Generator) -> Floats:
    return np.sqrt(share) * common + np.sqrt(1.0 - share) * rng.standard_normal(len(common))
