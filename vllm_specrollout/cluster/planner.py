"""Plans of drafting and verifying devices: who drafts, who verifies, and how far ahead, ranked by rehearsal. Pure.

Source: SpecActor, section 4.1, Algorithm 1. What a plan yields comes from rehearsal.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specrollout.cluster.profiles import DrafterProfile
from vllm_specrollout.cluster.rates import AffineTime, Mode, printed_rate
from vllm_specrollout.cluster.rehearsal import Match, Setting, coupled_tokens, rehearse
from vllm_specrollout.config.checks import check_range
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import MOST_NODES

WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Windows that are rehearsed, as long as they gain."""
REQUEST_STEPS = 1500
"""Steps of a rehearsal, of all its requests together. A rate is then within some 2 %."""
WORTH = 1.1
"""Of plain decoding: what an estimate has to be before a group lends drafters by it; estimates err by less."""
_REHEARSED = 16  # requests at most: each stands for so many of a larger batch
_BEYOND = 2
"""A verifier that never waits has use for windows beyond the paper's bound, which it overtakes before they arrive."""
_PATIENCE = 2  # longer windows in a row that gain nothing, after which no more are looked at


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
    match: Match
    # tokens of each position: the first choice, and exits beside it
    fan_out: int = 1
    max_window: int = MOST_NODES

    def __post_init__(self) -> None:
        check_range("fan_out", self.fan_out, 1, 8)
        check_range("max_window", self.max_window, 1, MOST_NODES)
        for devices, time in self.verify.items():
            if devices < 1 or time.ms(1) <= 0.0:
                raise ConfigError(
                    f"a verifier on {devices} devices takes {time.ms(1)} ms a step", "measure it on 1 device or more"
                )

    def drafts(self, window: int) -> int:
        """Nodes of a request that a step verifies, at most."""
        return min(window * self.fan_out, MOST_NODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Groups of devices alike, each with its share of the requests."""

    mode: Mode
    # of each group; 0 where drafts are made on the verifier's devices, or not at all
    draft_gpus: int
    verify_gpus: int
    # requests of a group
    batch: int
    # tokens; 0 if nothing is drafted
    window: int = 0
    # estimates: of one request, and of all
    tokens_per_step: float = 1.0
    tokens_per_s: float = 0.0
    total_tokens_per_s: float = 0.0
    # of one request, times its tokens_per_s when such a verifier decodes plainly
    gain: float = 1.0
    # of one request, as SpecActor's tau has it for that window; None: it has no such plans
    printed_per_s: float | None = None


def plan_devices(work: Workload, gpus: int, batch: int, *, one_host: bool = False, seed: int = 0) -> tuple[Plan, ...]:
    """Algorithm 1, with plain and coupled groups beside its decoupled ones; fastest first.

    A group of g_d + g_v devices has b = ceil((g_d + g_v) B / G) requests, and g_d is at most g_v, as in the paper. A
    coupled drafter runs on one of the verifier's devices.

    Args:
        gpus: G.
        batch: B, the requests of all groups together.
        one_host: groups are whole, devices that are left over stay idle, and any number of devices may draft.
        seed: of where requests begin among the known ranks.

    Raises:
        ConfigError: no verifier fits.
    """
    check_range("devices", gpus, 1, 1 << 16)
    check_range("batch", batch, 1, 1 << 24)
    fitting = [devices for devices in sorted(work.verify) if devices <= gpus]
    if not fitting:
        raise ConfigError(
            f"{gpus} devices, and the smallest verifier needs {min(work.verify)}", "give a verifier that fits"
        )
    groups = [(mode, 0, devices) for mode in (Mode.PLAIN, Mode.COUPLED) for devices in fitting]
    for devices in fitting:
        most = min(gpus if one_host else devices, gpus - devices)
        groups += [(Mode.DECOUPLED, drafters, devices) for drafters in range(1, most + 1)]
    plans = []
    for mode, drafters, devices in groups:
        size = drafters + devices
        share = math.ceil(batch / (gpus // size)) if one_host else math.ceil(size * batch / gpus)
        plans.append(_best(work, mode, drafters, devices, share, batch, seed))
    # Of equal ones the first: plain before coupled before decoupled, and fewer devices for a group. What agrees in nine
    # digits is equal: rounding would decide otherwise.
    return tuple(sorted(plans, key=lambda plan: -float(f"{plan.tokens_per_s:.9g}")))


def plan_engine(profile: DrafterProfile, batch: int) -> tuple[Plan, Plan]:
    """(the best plan with the drafter on a device of its own, the best of all) of one engine, by what is known."""
    (devices,) = profile.verify
    plans = plan_devices(workload(profile), devices + 1, batch, one_host=True)
    return next(plan for plan in plans if plan.mode is Mode.DECOUPLED and plan.draft_gpus == 1), plans[0]


def workload(profile: DrafterProfile, max_window: int = MOST_NODES) -> Workload:
    """What is known of a drafter, as it is planned with."""
    return Workload(
        draft=profile.draft,
        verify=profile.verify,
        match=profile.match(),
        fan_out=min(profile.fan_out, 8),
        max_window=max_window,
    )


def choose_ladder(profiles: Sequence[DrafterProfile]) -> tuple[str, tuple[str, ...]]:
    """(ladder, models) of a group, by what is known of drafters: the draft ladder, its best first.

    A straggler decodes alone in the end, so a drafter is worth what it gains at batch 1, as in SpecActor's initial
    selection (section 4.3). Where none gains `WORTH`, requests are moved, and nothing is drafted elsewhere.
    """
    gains = {one.drafter: plan_engine(one, 1)[0].gain for one in profiles}
    models = sorted((model for model, gain in gains.items() if gain >= WORTH), key=lambda model: -gains[model])
    return ("attach", tuple(models)) if models else ("move", ())


def largest_window(draft: AffineTime, verify: AffineTime, limit: int) -> int:
    """max(ceil(V' / D'), ceil(beta / alpha)): from there on drafting takes longer than verifying at any batch.

    V' grows with w, so this is the least w with w D' >= V' and w alpha >= beta; `limit` if there is none below it.
    """
    for window in range(1, limit):
        per_request = verify.per_request_ms + (window - 1) * verify.per_row_ms
        if window * draft.per_request_ms >= per_request and window * draft.fixed_ms >= verify.fixed_ms:
            return window
    return limit


def _best(work: Workload, mode: Mode, drafters: int, devices: int, share: int, batch: int, seed: int) -> Plan:
    """The group with the window that yields most, the shortest of several."""
    verify, draft = work.verify[devices], work.draft.shared_by(max(drafters, 1))
    best, since = (0, 1.0, 1.0 / verify.ms(share) if mode is Mode.PLAIN else 0.0), 0
    for window in () if mode is Mode.PLAIN else _windows(work, mode, draft, verify):
        if mode is Mode.COUPLED:
            tokens = coupled_tokens(work.match, window, work.fan_out)
            rate = tokens / (window * draft.ms(share) + verify.ms(share, work.drafts(window)))
        else:
            tokens, rate = _rehearsed(work, draft, verify, share, window, seed)
        since = 0 if rate > best[2] else since + 1
        best = (window, tokens, rate) if rate > best[2] else best
        if since == _PATIENCE:
            break
    window, tokens, rate = best
    printed = printed_rate(draft, verify, share, window, work.match.among(1)) if mode is Mode.DECOUPLED else None
    return Plan(
        mode=mode,
        draft_gpus=drafters,
        verify_gpus=devices,
        batch=share,
        window=window,
        tokens_per_step=tokens,
        tokens_per_s=1e3 * rate,
        total_tokens_per_s=1e3 * rate * batch,
        gain=rate * verify.ms(share),
        printed_per_s=None if printed is None else 1e3 * printed,
    )


def _windows(work: Workload, mode: Mode, draft: AffineTime, verify: AffineTime) -> Iterator[int]:
    limit = work.max_window
    if mode is Mode.DECOUPLED:
        limit = min(limit, _BEYOND * largest_window(draft, verify, limit))
    return iter(sorted({window for window in WINDOWS if window < limit} | {limit}))


def _rehearsed(
    work: Workload, draft: AffineTime, verify: AffineTime, batch: int, window: int, seed: int
) -> tuple[float, float]:
    """Tokens of a request per step, and per millisecond."""
    rehearsed = min(batch, _REHEARSED)
    each = batch / rehearsed
    setting = Setting(
        verify_ms=lambda requests, rows: verify.ms(requests * each, rows / requests),
        draft_ms=lambda lines, more: draft.ms(lines * each, more / lines),
        match=work.match,
        batch=rehearsed,
        window=window,
        fan_out=work.fan_out,
        most_drafts=work.drafts(window),
        most_depth=window,
    )
    found = rehearse(setting, np.random.default_rng(seed), max(REQUEST_STEPS // rehearsed, 1))
    return found.tokens_per_step, found.rate
