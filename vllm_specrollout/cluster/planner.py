"""Plans of drafting and verifying devices: who drafts, who verifies, and how far ahead, ranked by formula. Pure.

Source: SpecActor, section 4.1, Algorithm 1. What a plan yields comes from rates.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_specrollout.cluster.profiles import DrafterProfile, best_known
from vllm_specrollout.cluster.rates import AffineTime, Mode, coupled_rate, coupled_tokens, plain_rate, shared_stream
from vllm_specrollout.config.checks import check_range
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import MOST_NODES

WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Windows that are looked at."""
WORTH = 1.1
"""Of what engines have: what an estimate has to be before a group lends drafters by it; estimates err by less."""
_BEYOND = 2
"""A verifier that never waits has use for windows beyond the paper's bound, which it overtakes before they arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Groups of devices alike, each with its share of the requests."""

    mode: Mode
    # of each group; 0 where drafts are made on the verifier's devices, or not at all
    draft_gpus: int
    verify_gpus: int
    # how many such groups there are, and the requests of each
    groups: int
    batch: int
    # tokens; 0 if no model drafts
    window: int = 0
    # estimates: of one request, and of all
    tokens_per_step: float = 1.0
    tokens_per_s: float = 0.0
    total_tokens_per_s: float = 0.0
    # of one request, times its tokens_per_s by what such a verifier has: its own drafts, if they are known
    gain: float = 1.0


def plan_devices(
    profile: DrafterProfile, gpus: int, batch: int, *, max_window: int = MOST_NODES, one_host: bool = False
) -> tuple[Plan, ...]:
    """Algorithm 1, with groups beside its decoupled ones that are plain, coupled, or draft by what they have; fastest
    first.

    A group of g_d + g_v devices has b = ceil((g_d + g_v) B / G) requests, and g_d is at most g_v, as in the paper. A
    coupled drafter runs on one of the verifier's devices.

    Args:
        gpus: G.
        batch: B, the requests of all groups together.
        max_window: tokens.
        one_host: groups are whole, devices that are left over stay idle, and any number of devices may draft.

    Raises:
        ConfigError: no verifier fits.
    """
    check_range("devices", gpus, 1, 1 << 16)
    check_range("batch", batch, 1, 1 << 24)
    check_range("max_window", max_window, 1, MOST_NODES)
    fitting = [devices for devices in sorted(profile.verify) if devices <= gpus]
    if not fitting:
        raise ConfigError(
            f"{gpus} devices, and the smallest verifier needs {min(profile.verify)}", "give a verifier that fits"
        )
    alone = (Mode.PLAIN, Mode.COUPLED) if profile.own is None else (Mode.PLAIN, Mode.OWN, Mode.COUPLED)
    found = [(mode, 0, devices) for mode in alone for devices in fitting]
    for devices in fitting:
        most = min(gpus if one_host else devices, gpus - devices)
        found += [(Mode.DECOUPLED, drafters, devices) for drafters in range(1, most + 1)]
    plans = []
    for mode, drafters, devices in found:
        groups = max(gpus // (drafters + devices), 1)
        share = math.ceil(batch / groups) if one_host else math.ceil((drafters + devices) * batch / gpus)
        window, tokens, rate, gain = _best(profile, mode, drafters, devices, share, max_window)
        plan = Plan(
            mode=mode,
            draft_gpus=drafters,
            verify_gpus=devices,
            groups=min(groups, batch),
            batch=share,
            window=window,
            tokens_per_step=tokens,
            tokens_per_s=1e3 * rate,
            total_tokens_per_s=1e3 * rate * batch,
            gain=gain,
        )
        plans.append(plan)
    # Of equal ones the first: plain before coupled before decoupled, and fewer devices for a group. What agrees in nine
    # digits is equal: rounding would decide otherwise.
    return tuple(sorted(plans, key=lambda plan: -float(f"{plan.tokens_per_s:.9g}")))


def plan_engine(profile: DrafterProfile, batch: int) -> tuple[Plan, Plan]:
    """(the best plan with the drafter on a device of its own, the best of all) of one engine, by what is known."""
    (devices,) = profile.verify
    plans = plan_devices(profile, devices + 1, batch, one_host=True)
    return next(plan for plan in plans if plan.mode is Mode.DECOUPLED and plan.draft_gpus == 1), plans[0]


def choose_ladder(profiles: Sequence[DrafterProfile]) -> tuple[str, tuple[str, ...]]:
    """(ladder, models) of a group, by what is known of drafters: the draft ladder, its best first.

    A straggler decodes alone in the end, so a drafter is worth what it gains at batch 1, as in SpecActor's initial
    selection (section 4.3). Where none gains `WORTH`, requests are moved, and nothing is drafted elsewhere.
    """
    gains = {model: plan_engine(one, 1)[0].gain for model, one in best_known(profiles).items()}
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


def _best(
    profile: DrafterProfile, mode: Mode, drafters: int, devices: int, share: int, limit: int
) -> tuple[int, float, float, float]:
    """Of the window that yields most, the shortest of several: itself, tokens of a step and per ms, and the gain."""
    verify, draft, own = profile.verify[devices], profile.draft.shared_by(max(drafters, 1)), profile.own
    plain = plain_rate(verify, share)
    has = plain if own is None else own.tokens / verify.ms(share, own.drafts)
    if mode is Mode.PLAIN:
        return 0, 1.0, plain, plain / has
    if mode is Mode.OWN and own is not None:
        return 0, own.tokens, has, 1.0
    if mode is Mode.DECOUPLED:
        limit = min(limit, _BEYOND * largest_window(draft, verify, limit))
    found = []
    for window in sorted({window for window in WINDOWS if window < limit} | {limit}):
        if mode is Mode.COUPLED:
            tokens = coupled_tokens(profile.match, window)
            rate = coupled_rate(draft, verify, share, window, profile.match)
        else:
            stream = shared_stream(draft, verify, share, window, profile.match)
            tokens, rate = stream.tokens, stream.rate
        found.append((window, tokens, rate))
    window, tokens, rate = max(found, key=lambda one: one[2])
    return window, tokens, rate, rate / has
