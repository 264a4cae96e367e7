import numpy as np
import pytest

from tests.unit.cluster.simulate.builders import DRAFTER, VERIFIER
from vllm_specrollout.cluster.simulate.step_line import StepLine
from vllm_specrollout.cluster.simulate.windows import (
    MAX_WINDOW,
    Reconfiguration,
    best_window,
    coupled_tgs,
    decoupled_tgs,
    plain_tgs,
)


def test_coupled_speed_by_hand():
    verifier, drafter = StepLine(base=10.0), StepLine(base=2.0)
    # 1 + 0.5 + 0.25 tokens in 2 * 2 + 10 ms
    assert coupled_tgs(0.5, 2, 1, verifier, drafter) == pytest.approx(1.75 / 14.0)


def test_decoupled_speed_by_hand():
    verifier, drafter = StepLine(base=10.0), StepLine(base=1.0)
    # ready: 1 + p tokens, stays so with p**2; not ready: 1 token, gets ready with p; half: 0.5 / (1 - 0.25 + 0.5) = 0.4
    assert decoupled_tgs(0.5, 2, 4, verifier, drafter) == pytest.approx((0.4 * 1.5 + 0.6) / 10.0)


def test_the_best_window_grows_with_the_acceptance_and_shrinks_with_the_batch():
    coupled = [best_window(coupled_tgs, p, 1, VERIFIER, DRAFTER.line) for p in (0.2, 0.5, 0.8, 0.95)]
    assert coupled == sorted(coupled) and coupled[0] < coupled[-1] <= MAX_WINDOW
    ahead = [best_window(decoupled_tgs, 0.8, batch, VERIFIER, DRAFTER.line) for batch in (1, 128, 320)]
    assert ahead == sorted(ahead, reverse=True) and ahead[0] > ahead[-1]


def test_drafts_that_cost_nothing_never_lose_to_plain_decoding():
    flat, free = StepLine(base=10.0), StepLine(base=0.0)
    for p in (0.0, 0.3, 0.9):
        assert coupled_tgs(p, 4, 8, flat, free) >= plain_tgs(8, flat)


def test_a_request_well_below_the_average_gets_a_window_of_its_own():
    hits = np.asarray([9_000] * 319 + [3_000])
    windows, is_decoupled = Reconfiguration(VERIFIER, DRAFTER.line)(hits, np.full(320, 10_000))
    assert len(set(windows[:319])) == 1 and windows[319] < windows[0]
    assert is_decoupled.all()


def test_a_request_below_the_average_by_chance_keeps_the_groups_window():
    windows, _ = Reconfiguration(VERIFIER, DRAFTER.line)(np.asarray([80] * 63 + [78]), np.full(64, 100))
    assert len(set(windows)) == 1
