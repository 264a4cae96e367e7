"""Which devices draft, which verify, and how far ahead.

Source: SpecActor, section 4.1, Algorithm 1. What belongs here: the search over groups of devices and windows. What a
choice yields is in rates.py and timetable.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from vllm_specrollout.config.checks import check_real
from vllm_specrollout.decoupled.rates import (
    NO_EXITS,
    Exits,
    Mode,
    coupled_rate,
    plain_rate,
    printed_rate,
    waiting_rate,
)
from vllm_specrollout.decoupled.times import AffineTime
from vllm_specrollout.decoupled.timetable import decoupled_rate
from vllm_specrollout.errors import ConfigError

Rate = Callable[[AffineTime, AffineTime, int, int, float], float]
"""draft, verify, batch, window, match rate -> tokens per millisecond of a request."""
TAUS: Mapping[str, Rate] = {"exact": decoupled_rate, "waiting": waiting_rate, "paper": printed_rate}
"""Models of decoupled speculation: a verifier that never waits, one that waits, and that one as the paper prints it."""
MAX_WINDOW = 64
"""Longest window looked at: the most nodes that a request's draft may have."""
_BEYOND = 2
"""A verifier that never waits has use for windows beyond the paper's bound, which it overtakes before they arrive. Of
500 random workloads the bound itself lost up to 8.5 %, twice the bound at most 0.04 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Groups of devices alike, each with its share of the requests."""

    mode: Mode
    # of each group; 0 where drafts are made on the verifier's devices, or not at all
    draft_gpus: int
    verify_gpus: int
    # tokens; 0 if nothing is drafted
    window: int
    # requests of a group
    batch: int
    # whether exits are drafted; a plan may do without, where they cost more than they yield
    has_exits: bool
    # estimates: of one request, and of all
    tokens_per_s: float
    total_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """The fastest plan, and the others with their best windows, fastest first."""

    best: Plan
    others: tuple[Plan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is planned for.

    Raises:
        ConfigError: a value out of range.
    """

    # D(b) of one device that drafts; several share the batch
    draft: AffineTime
    # devices -> V(b, w) of a verifier on so many: the paper's set G
    verify: Mapping[int, AffineTime]
    # p, per drafted token
    match_rate: float
    exits: Exits = NO_EXITS
    # a key of `TAUS`
    tau: str = "exact"
    max_window: int = MAX_WINDOW

    def __post_init__(self) -> None:
        check_real("match_rate", self.match_rate, 0, 1)
        if self.tau not in TAUS:
            raise ConfigError(f"`tau` is {self.tau!r}, which does not exist", f"choose from: {', '.join(TAUS)}")
        if self.exits != NO_EXITS and self.tau != "exact":
            raise ConfigError(f"exits are given, and `tau` is {self.tau!r}", "exits are modelled with `exact` alone")
        if self.max_window < 1:
            raise ConfigError(f"`max_window` is {self.max_window}", "choose 1 or more")
        if not self.verify:
            raise ConfigError("no verifier is given", "give its time on one number of devices at least")
        for devices, time in self.verify.items():
            if devices < 1 or time.ms(1) <= 0.0:
                raise ConfigError(
                    f"a verifier on {devices} devices takes {time.ms(1)} ms a step", "measure it on 1 device or more"
                )

    def rates(self, mode: Mode) -> list[Rate]:
        """Of a mode that drafts: without exits, and with them if there are any."""
        rate: Callable[..., float] = coupled_rate if mode is Mode.COUPLED else TAUS[self.tau]
        return [rate] if self.exits == NO_EXITS else [rate, partial(rate, exits=self.exits)]


def plan_cluster(work: Workload, gpus: int, batch: int) -> Ranking:
    """Algorithm 1, with plain and coupled groups beside its decoupled ones.

    A group of g_d + g_v devices has b = ceil((g_d + g_v) B / G) requests; the cluster need not be a whole number of
    groups. As in the paper, g_d is at most g_v, and w at most what `largest_window` says, or twice that if the verifier
    never waits. A coupled drafter runs on one of the verifier's devices.

    Args:
        gpus: G.
        batch: B, the requests of all groups together.

    Raises:
        ConfigError: no verifier fits.
    """
    _check_sizes(gpus, batch)
    return _ranking(work, gpus, batch, lambda size: math.ceil(size * batch / gpus), lambda verify: verify)


def choose_placement(work: Workload, devices: int, batch: int) -> Ranking:
    """Plain, coupled or decoupled for the devices of one host, and the window.

    Here groups are whole: devices that are left over stay idle. Any number of devices may draft.

    Raises:
        ConfigError: no verifier fits.
    """
    _check_sizes(devices, batch)
    return _ranking(work, devices, batch, lambda size: math.ceil(batch / (devices // size)), lambda verify: devices)


def largest_window(draft: AffineTime, verify: AffineTime, limit: int) -> int:
    """max(ceil(V' / D'), ceil(beta / alpha)): from there on drafting takes longer than verifying at any batch.

    V' grows with w, so this is the least w with w D' >= V' and w alpha >= beta; `limit` if there is none below it.
    """
    for window in range(1, limit):
        per_request = verify.per_request_ms + (window - 1) * verify.per_row_ms
        if window * draft.per_request_ms >= per_request and window * draft.fixed_ms >= verify.fixed_ms:
            return window
    return limit


def _check_sizes(gpus: int, batch: int) -> None:
    for name, value in (("devices", gpus), ("batch", batch)):
        if value < 1:
            raise ConfigError(f"`{name}` is {value}", "choose 1 or more")


def _ranking(
    work: Workload, gpus: int, batch: int, share: Callable[[int], int], most_drafters: Callable[[int], int]
) -> Ranking:
    """Args: share, devices of a group -> its requests; most_drafters, g_v -> the largest g_d to look at."""
    plans = []
    for mode, drafters, verifiers, found in _searched(work, gpus, share, most_drafters):
        window, has_exits, rate = found
        plans.append(
            Plan(
                mode=mode,
                draft_gpus=drafters,
                verify_gpus=verifiers,
                window=window,
                has_exits=has_exits,
                batch=share(drafters + verifiers),
                tokens_per_s=1e3 * rate,
                total_tokens_per_s=1e3 * rate * batch,
            )
        )
    if not plans:
        raise ConfigError(
            f"{gpus} devices, and the smallest verifier needs {min(work.verify)}", "give a verifier that fits"
        )
    # Of equal ones the first: plain before coupled before decoupled, and fewer devices for a group. What agrees in nine
    # digits is equal: rounding would decide otherwise.
    best, *others = sorted(plans, key=lambda plan: -float(f"{plan.tokens_per_s:.9g}"))
    return Ranking(best, tuple(others))


_Found = tuple[int, bool, float]
"""A window, whether exits are drafted, and the rate."""


def _searched(
    work: Workload, gpus: int, share: Callable[[int], int], most_drafters: Callable[[int], int]
) -> Iterator[tuple[Mode, int, int, _Found]]:
    """Each mode and group that fits, with the window that is best for it."""
    fitting = [(devices, time) for devices, time in sorted(work.verify.items()) if devices <= gpus]
    for devices, time in fitting:
        yield Mode.PLAIN, 0, devices, (0, False, plain_rate(time, share(devices)))
    for devices, time in fitting:
        yield Mode.COUPLED, 0, devices, _best(work, Mode.COUPLED, work.draft, time, share(devices), work.max_window)
    for devices, time in fitting:
        for drafters in range(1, min(most_drafters(devices), gpus - devices) + 1):
            draft = work.draft.shared_by(drafters)
            bound = largest_window(draft, time, work.max_window)
            limit = min(work.max_window, bound * (_BEYOND if work.tau == "exact" else 1))
            found = _best(work, Mode.DECOUPLED, draft, time, share(drafters + devices), limit)
            yield Mode.DECOUPLED, drafters, devices, found


def _best(work: Workload, mode: Mode, draft: AffineTime, verify: AffineTime, batch: int, limit: int) -> _Found:
    """The window from 1 to `limit` with the highest rate, the shortest of several, and rather without exits."""
    found: _Found = (0, False, 0.0)
    for has_exits, rate in enumerate(work.rates(mode)):
        for window in range(1, limit + 1):
            tokens = rate(draft, verify, batch, window, work.match_rate)
            if tokens > found[2]:
                found = (window, bool(has_exits), tokens)
    return found
