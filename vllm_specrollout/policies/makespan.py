"""What a token is worth to the makespan, per request.

What belongs here: from how long answers may still take to milliseconds saved per token. Not how many are drafted.

The step ends with its last answer. If answer i still takes S_i steps, the rest of the rollout costs about

    T = fixed * max_i S_i + sum_i request_ms_i * S_i

A token of answer i is worth what it would cost otherwise: a plain step for itself, or its share of a step with drafts,
a_i tokens for the rows of its n_i nodes besides, whichever is less:

    w_i = min(fixed * P_i + request_ms,  (fixed * P_i + request_ms + row_ms * n_i) / a_i)        milliseconds

with P_i the probability that i ends last: S_i is not known, its distribution is guessed (policies/length.py). Where all
answers are alike, P is 1 / R, and "worth more than it costs" is the rule of throughput: a node pays if it yields more
tokens per millisecond than the batch does. Where one answer is long, its tokens are worth nearly a step each, and those
of the others only the rows they free. While requests wait, a place that comes free is filled again: it is busy for S_i
steps, or up to the level that what waits fills the places to, whichever is more.

The last of many answers is also one that its drafts have helped least. If each of an answer's L tokens brings g more on
average, the steps saved scatter by chance: as many tokens as L * g are gained, give or take its root. The unluckiest of
R answers alike gains z(R) standard deviations less, z(R) being the mean of the largest of R normal variates. Where its
length L is itself known to +- s only, long ones end last rather than unlucky ones, and chance counts for less:

    luck = 1 - z(R) / sqrt(L * g + s^2)        the share of a mean gain that is a gain of the makespan

so that the first term of w_i becomes fixed * P_i * luck_i.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_LEAST_GAIN = 0.5  # tokens that drafts bring per token, to go by where they bring less: it is what they might bring
_GRID = 64  # spans of time in which the answers' chances of ending are compared


def chances_of_ending_last(steps: Array) -> Array:
    """[R] probability that each answer is the last to end, all ending independently of each other.

    Args:
        steps: [R, K] equally likely values of how many steps each answer still takes.
    """
    num, k = steps.shape
    # whatever ends before the longest answer's shortest case never ends last
    low, high = float(steps.min(axis=1).max()), float(steps.max())
    if num == 1 or high <= low:
        at_end = (steps >= low).mean(axis=1) + 1e-9
        return at_end / at_end.sum()
    # the first span holds all that ends too early, the others share what is left
    at = np.ceil((steps.ravel() - low) * ((_GRID - 2) / (high - low))).astype(np.int64) + 1
    at = np.clip(at, 0, _GRID - 1)
    rows = np.repeat(np.arange(num), k)
    ends = np.bincount(rows * _GRID + at, minlength=num * _GRID).reshape(num, _GRID) / k
    # of two that end within the same span, either may be the later one
    ended = np.cumsum(ends, axis=1) - 0.5 * ends
    log_ended = np.log(np.maximum(ended, 1e-6))
    all_ended = log_ended.sum(axis=0)
    last = (ends * np.exp(all_ended - log_ended))[:, 1:].sum(axis=1) + 1e-12
    return last / last.sum()


def level(steps: Array, waiting: float) -> float:
    """Steps after which the places are free of what runs and of what waits, whichever place takes it.

    What waits fills up the places that come free first, like water; a place that is busy for longer stands out of it.

    Args:
        steps: [R] steps that each running answer still takes.
        waiting: the same of all that wait, summed.
    """
    ordered = np.sort(steps)
    # levels at which the first 1, 2, ... R places hold all that waits
    levels = (np.cumsum(ordered) + waiting) / np.arange(1, len(ordered) + 1)
    return float(levels.min())


@functools.lru_cache(maxsize=1024)
def _largest_of(num: int) -> float:
    """Mean of the largest of so many standard normal variates (Blom's approximation; 0 for one)."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0


def luck(steps: Array, tokens_per_step: float, last: Array) -> Array:
    """[R] share of what drafts gain on average that is a gain of the last answer to end; 1.0 where it is known which.

    Args:
        steps: [R, K] equally likely values of how many steps each answer still takes.
        tokens_per_step: recent tokens per step, of all requests alike.
        last: [R] probability of each to end last.
    """
    rivals = round(float(1.0 / (last * last).sum()))
    if rivals <= 1:
        return np.ones(len(last))
    tokens = steps * tokens_per_step
    gain = max(tokens_per_step - 1.0, _LEAST_GAIN)
    spread = np.sqrt(tokens.mean(axis=1) * gain + tokens.var(axis=1))
    return np.clip(1.0 - _largest_of(rivals) / spread, 0.0, 1.0)


def weights(steps: Array, tokens_per_step: float) -> Array:
    """[R] steps that one more token of each request saves: its chance of ending last, times `luck`."""
    last = chances_of_ending_last(scattered(steps, tokens_per_step))
    return last * luck(steps, tokens_per_step, last)


def scattered(steps: Array, tokens_per_step: float) -> Array:
    """[R, K] the same values, each with as much luck as drafts bring to it: which answer ends last is not known yet."""
    gain = max(tokens_per_step - 1.0, _LEAST_GAIN)
    return np.maximum(steps + _quantiles(steps.shape[1]) * np.sqrt(steps * (gain / tokens_per_step)), 0.0)


@functools.lru_cache(maxsize=16)
def _quantiles(num: int) -> Array:
    """[num] of the normal distribution, in an order that has nothing to do with the cases' rising one."""
    step = next(step for step in (3, 5, 7, 1) if math.gcd(step, num) == 1)
    order = [(step * k + num // 2) % num for k in range(num)]
    return np.asarray([NormalDist().inv_cdf((k + 0.5) / num) for k in order])


def token_worth(
    weight: Array,
    tokens_per_step: Array,
    nodes_per_step: Array,
    fixed_ms: float,
    request_ms: float,
    row_ms: float,
) -> Array:
    """[R] milliseconds of makespan that one more token of each request saves.

    Args:
        weight: [R] steps that it saves.
        tokens_per_step: [R] recent tokens per step of each request.
        nodes_per_step: [R] recent draft nodes per step of each request.
        fixed_ms: what a step costs whatever is in it.
        request_ms: what a request adds to a plain step.
        row_ms: what a draft node adds.
    """
    plain = fixed_ms * weight + request_ms
    return np.minimum(plain, (plain + row_ms * nodes_per_step) / tokens_per_step)
