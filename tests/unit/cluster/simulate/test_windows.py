import numpy as np
import pytest

from tests.unit.cluster.simulate.builders import DRAFTER, VERIFIER
from vllm_specrollout.cluster.simulate.step_line import StepLine
from vllm_specrollout.cluster.simulate.windows import Reconfiguration, best_window
from vllm_specrollout.decoupled.rates import coupled_rate, decoupled_rate, plain_rate
from vllm_specrollout.decoupled.reconfigure import MAX_WINDOW


def test_coupled_speed_by_hand():
    verifier, drafter = StepLine(base=10.0), StepLine(base=2.0)
    # 1 + 0.5 + 0.25 tokens in 2 * 2 + 10 ms
    assert coupled_rate(drafter, verifier, 1, 2, 0.5) == pytest.approx(1.75 / 14.0)


def test_decoupled_speed_by_hand():
    verifier, drafter = StepLine(base=10.0), StepLine(base=1.0)
    # ready: 1 + p tokens, stays so with p**2; not ready: 1 token, gets ready with p; half: 0.5 / (1 - 0.25 + 0.5) = 0.4
    assert decoupled_rate(drafter, verifier, 4, 2, 0.5) == pytest.approx((0.4 * 1.5 + 0.6) / 10.0)


def test_the_best_window_grows_with_the_acceptance_and_shrinks_with_the_batch():
    coupled = [best_window(coupled_rate, p, 1, VERIFIER, DRAFTER.line) for p in (0.2, 0.5, 0.8, 0.95)]
    assert coupled == sorted(coupled) and coupled[0] < coupled[-1] <= MAX_WINDOW
    ahead = [best_window(decoupled_rate, 0.8, batch, VERIFIER, DRAFTER.line) for batch in (1, 128, 320)]
    assert ahead == sorted(ahead, reverse=True) and ahead[0] > ahead[-1]


def test_drafts_that_cost_nothing_never_lose_to_plain_decoding():
    flat, free = StepLine(base=10.0), StepLine(base=0.0)
    for p in (0.0, 0.3, 0.9):
        assert coupled_rate(free, flat, 8, 4, p) >= plain_rate(flat, 8)


def test_a_request_well_below_the_average_gets_a_window_of_its_own():
    hits = np.asarray([9_000] * 319 + [3_000])
    windows, is_decoupled = Reconfiguration(VERIFIER, DRAFTER.line)(hits, np.full(320, 10_000))
    assert len(set(windows[:319])) == 1 and windows[319] < windows[0]
    assert is_decoupled.all()


def test_a_request_below_the_average_by_chance_keeps_the_groups_window():
    windows, _ = Reconfiguration(VERIFIER, DRAFTER.line)(np.asarray([80] * 63 + [78]), np.full(64, 100))
    assert len(set(windows)) == 1
