"""What a rollout has to do: how long each answer gets, and how well each drafting method guesses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_specrollout.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All requests of one rollout."""

    # [N] tokens to generate, int
    length: Ints
    # [M, N] probability that a token drafted by method m for request n is right, when those before it are
    acceptance: Floats
    # tokens of each prompt
    prompt: int = 0

    def __post_init__(self) -> None:
        if not len(self.length) or self.length.min() < 1:
            raise ConfigError("a rollout has no request, or one without tokens", "give lengths of at least 1")
        if self.acceptance.ndim != 2 or self.acceptance.shape[1] != len(self.length):
            shape = self.acceptance.shape
            raise ConfigError(
                f"acceptance has shape {shape} for {len(self.length)} requests", "give [methods, requests]"
            )
        if not ((self.acceptance >= 0.0) & (self.acceptance <= 1.0)).all():
            raise ConfigError("an acceptance lies outside 0 to 1", "give probabilities")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlan:
    """Log-normal lengths: answers to one problem share a part of the variance."""

    median: float
    # standard deviation of the logarithm
    spread: float
    # share of the variance that a problem's answers have in common, 0 to 1
    shared: float
    # answers are cut here
    longest: int
    # answers per problem
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptancePlan:
    """Logit-normal acceptances: what makes a request hard is partly common to all methods, partly each method's own."""

    # [M] of the median request
    medians: tuple[float, ...]
    # standard deviation of the logit over requests
    spread: float
    # share of that variance common to all methods, 0 to 1
    common: float
    # correlation of the common part with the logarithm of the length: below 0, long answers are drafted worse
    with_length: float


def draw_workload(
    requests: int, lengths: LengthPlan, acceptances: AcceptancePlan, rng: np.random.Generator, prompt: int = 0
) -> Workload:
    """Lengths and acceptances of `requests` requests."""
    problems = -(-requests // lengths.samples)
    of_problem = np.repeat(rng.standard_normal(problems), lengths.samples)[:requests]
    own = rng.standard_normal(requests)
    size = np.sqrt(lengths.shared) * of_problem + np.sqrt(1.0 - lengths.shared) * own
    length = np.clip(np.rint(lengths.median * np.exp(lengths.spread * size)), 1, lengths.longest).astype(np.int64)
    related = acceptances.with_length
    common = related * size + np.sqrt(1.0 - related**2) * rng.standard_normal(requests)
    rows = [
        _logistic(_logit(median) + acceptances.spread * _mixed(common, rng, acceptances.common))
        for median in acceptances.medians
    ]
    return Workload(length=length, acceptance=np.stack(rows), prompt=prompt)


def constant_workload(lengths: Sequence[int], acceptance: float, prompt: int = 0) -> Workload:
    """Given lengths, one method, and the same acceptance for all."""
    length = np.asarray(lengths, dtype=np.int64)
    return Workload(length=length, acceptance=np.full((1, len(length)), acceptance), prompt=prompt)


def _mixed(common: Floats, rng: np.random.Generator, share: float) -> Floats:
    return np.sqrt(share) * common + np.sqrt(1.0 - share) * rng.standard_normal(len(common))


def _logit(p: float) -> float:
    return float(np.log(p) - np.log1p(-p))


def _logistic(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-x))
