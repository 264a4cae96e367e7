"""Plans by formula: who is ranked, against what, and what of it is the paper's."""

import math
from typing import Any

import pytest

from vllm_specrollout.cluster.planner import Plan, choose_ladder, largest_window, plan_devices, plan_engine
from vllm_specrollout.cluster.profiles import DrafterProfile, OwnDrafts
from vllm_specrollout.cluster.rates import AffineTime, Mode, coupled_rate, decoupled_rate, plain_rate
from vllm_specrollout.errors import ConfigError

DRAFT = AffineTime(0.002, 1.0)
VERIFY = {1: AffineTime(0.2, 40.0, 0.1), 2: AffineTime(0.1, 22.0, 0.06)}


def known(match: float = 0.8, **changes: Any) -> DrafterProfile:
    return DrafterProfile(**{"draft": DRAFT, "verify": VERIFY, "match": match, "drafter": "small", **changes})


def by_mode(plans: tuple[Plan, ...]) -> dict[Mode, Plan]:
    """The best of each mode."""
    return {plan.mode: plan for plan in reversed(plans)}


def one_verifier(
    draft: AffineTime, verify: AffineTime, match: float, batch: int = 1, most: int = 4
) -> dict[Mode, Plan]:
    profile = known(match, draft=draft, verify={1: verify})
    return by_mode(plan_devices(profile, 2, batch, one_host=True, max_window=most))


def test_every_mode_and_group_is_ranked_once_and_the_fastest_first() -> None:
    plans = plan_devices(known(), 64, 256, max_window=4)
    speeds = [plan.tokens_per_s for plan in plans]
    assert speeds == sorted(speeds, reverse=True)
    groups = {(plan.mode, plan.draft_gpus, plan.verify_gpus) for plan in plans}
    assert len(groups) == len(plans) == 2 + 2 + (1 + 2), "no more drafters than verifiers"
    assert all((plan.window == 0) == (plan.mode is Mode.PLAIN) for plan in plans)
    assert all((plan.draft_gpus == 0) != (plan.mode is Mode.DECOUPLED) for plan in plans)
    assert max(plan.window for plan in plans) <= 4


def test_a_group_has_its_share_of_the_requests() -> None:
    for plan in plan_devices(known(), 64, 256):
        assert plan.batch == math.ceil((plan.draft_gpus + plan.verify_gpus) * 256 / 64)
        assert plan.total_tokens_per_s == pytest.approx(256 * plan.tokens_per_s)


def test_groups_larger_than_the_cluster_are_left_out() -> None:
    assert {plan.draft_gpus + plan.verify_gpus for plan in plan_devices(known(), 2, 8)} == {1, 2}
    with pytest.raises(ConfigError, match="2 devices, and the smallest verifier needs 4"):
        plan_devices(known(verify={4: VERIFY[1]}), 2, 1)


def test_a_hosts_groups_are_whole_and_any_number_of_devices_drafts() -> None:
    plans = plan_devices(known(verify={2: AffineTime(0.1, 10.0)}), 5, 12, one_host=True)
    batches = {(plan.draft_gpus, plan.verify_gpus): plan.batch for plan in plans}
    assert batches == {(0, 2): 6, (1, 2): 12, (2, 2): 12, (3, 2): 12}


def test_the_largest_window_is_the_papers() -> None:
    """max(ceil(V' / D'), ceil(beta / alpha)) where rows cost nothing."""
    draft, verify = AffineTime(0.3, 1.5), AffineTime(1.0, 10.0)
    assert largest_window(draft, verify, 64) == max(math.ceil(1.0 / 0.3), math.ceil(10.0 / 1.5))
    assert largest_window(AffineTime(0.1, 1.5), verify, 64) == math.ceil(1.0 / 0.1)
    assert largest_window(AffineTime(0.0, 1.5), verify, 64) == 64


@pytest.mark.parametrize(("p", "batch"), [(0.5, 1), (0.8, 4), (0.8, 64)])
def test_what_a_plan_yields_is_its_formula(p: float, batch: int) -> None:
    draft, verify = AffineTime(0.0, 0.1), AffineTime(0.1, 20.0, 0.05)
    found = one_verifier(draft, verify, p, batch)
    plain = found[Mode.PLAIN]
    assert plain.tokens_per_s == pytest.approx(1e3 * plain_rate(verify, plain.batch))
    for mode, rate in ((Mode.COUPLED, coupled_rate), (Mode.DECOUPLED, decoupled_rate)):
        plan = found[mode]
        assert plan.tokens_per_s == pytest.approx(1e3 * rate(draft, verify, plan.batch, plan.window, p)), mode


@pytest.mark.parametrize(
    ("draft", "match_rate", "mode"),
    [
        (AffineTime(0.0, 20.0), 0.9, Mode.PLAIN),  # slower than the verifier
        (AffineTime(0.0, 1.0), 0.0, Mode.PLAIN),
        (AffineTime(0.0, 0.01), 0.8, Mode.COUPLED),  # as good as free: nothing to hide
        (AffineTime(0.0, 2.0), 0.9, Mode.DECOUPLED),
    ],
)
def test_two_devices_are_used_as_suits_the_drafter(draft: AffineTime, match_rate: float, mode: Mode) -> None:
    work = known(match_rate, draft=draft, verify={1: AffineTime(0.0, 10.0, 0.1)})
    assert plan_devices(work, 2, 1, one_host=True, max_window=16)[0].mode is mode


@pytest.mark.parametrize(("share", "gains"), [(0.5, (1.20, 1.27)), (0.8, (1.02, 1.10))])
def test_decoupling_pays_as_the_page_says(share: float, gains: tuple[float, ...]) -> None:
    """docs/concepts/planning.md; two devices and one request, so the modes have the same verifier."""
    found = []
    for match_rate in (0.5, 0.8):
        draft, verify = AffineTime(0.0, 10.0 * share), AffineTime(0.0, 10.0, 0.03)
        plans = one_verifier(draft, verify, match_rate, most=24)
        speeds = {mode: plan.tokens_per_s for mode, plan in plans.items()}
        found.append(speeds[Mode.DECOUPLED] / max(speeds[Mode.COUPLED], speeds[Mode.PLAIN]))
    assert found == pytest.approx(gains, abs=0.01)


ENGINE: dict[str, Any] = {"draft": AffineTime(0.0, 2.0), "verify": {1: AffineTime(0.3, 13.0, 0.05)}}


def test_an_engine_is_planned_with_one_drafter_beside_its_ranks() -> None:
    ahead, best = plan_engine(known(**{**ENGINE, "verify": {4: AffineTime(0.3, 13.0, 0.05)}}), 2)
    assert (ahead.mode, ahead.draft_gpus, ahead.verify_gpus) == (Mode.DECOUPLED, 1, 4)
    assert best.tokens_per_s >= ahead.tokens_per_s and ahead.gain > 1.0
    assert ahead.gain == pytest.approx(ahead.tokens_per_s / 1e3 * AffineTime(0.3, 13.0).ms(2))


def test_a_model_is_measured_by_what_the_engine_has_and_plain_decoding_stays_a_choice() -> None:
    own = OwnDrafts(2.5, 4.0)
    plans = by_mode(plan_devices(known(**ENGINE, own=own), 2, 1, one_host=True))
    step_ms = ENGINE["verify"][1].ms(1, 4.0)
    assert plans[Mode.OWN].tokens_per_s == pytest.approx(2.5e3 / step_ms) and plans[Mode.OWN].gain == 1.0
    assert plans[Mode.PLAIN].gain == pytest.approx(step_ms / (2.5 * ENGINE["verify"][1].ms(1)))
    without = by_mode(plan_devices(known(**ENGINE), 2, 1, one_host=True))
    assert Mode.OWN not in without and without[Mode.DECOUPLED].gain > plans[Mode.DECOUPLED].gain
    poor = plan_devices(known(0.0, **ENGINE, own=OwnDrafts(1.01, 8.0)), 2, 1, one_host=True)
    assert poor[0].mode is Mode.PLAIN


def test_the_draft_ladder_has_what_gains_for_a_request_alone_over_the_engines_own_drafts_the_best_first() -> None:
    fast, fair = known(**ENGINE, drafter="fast"), known(0.6, **ENGINE, drafter="fair")
    slow = known(drafter="slow", draft=AffineTime(0.0, 40.0), verify=ENGINE["verify"])
    assert choose_ladder([slow, fair, fast]) == ("attach", ("fast", "fair"))
    own = known(**ENGINE, own=OwnDrafts(4.0, 6.0))
    assert choose_ladder([slow]) == choose_ladder([]) == choose_ladder([own]) == ("move", ())
