import numpy as np
import pytest

from tests.unit.budgets.builders import chains, record
from vllm_specrollout.budgets.goodput import Acceptance, GoodputBudget
from vllm_specrollout.types import SOURCES, TENTHS, empty_trees

TENTH = 7  # of 0.75


def after(acceptance: Acceptance, steps: int, accepted: int, *, probability: float = 0.75, **values: int) -> Acceptance:
    trees = chains(8, 1, probability, values.pop("source", 0))
    for _ in range(steps):
        acceptance.observe(record(trees, [1] * accepted + [0] * (8 - accepted), **values))
    return acceptance


@pytest.mark.parametrize(("accepted", "factor"), [(6, 1.0), (3, 0.5)])
def test_a_drafter_is_believed_as_far_as_it_told_the_truth(accepted: int, factor: float) -> None:
    assert after(Acceptance(), 200, accepted).calibration()[0, TENTH] == pytest.approx(factor, abs=0.02)


def test_other_drafters_and_other_tenths_are_not_touched() -> None:
    calibration = after(Acceptance(), 50, 1, source=3).calibration()
    assert calibration.shape == (SOURCES, TENTHS) and calibration[3, TENTH] < 0.5
    calibration[3, TENTH] = 1.0
    assert (calibration == 1.0).all()


@pytest.mark.parametrize("probability", [0.05, 0.55, 0.95])
def test_the_prior_weighs_as_many_observations_for_unlikely_nodes(probability: float) -> None:
    """24 rejected nodes against 20 that were never seen, whatever was claimed."""
    tenth = int(probability * TENTHS)
    factor = after(Acceptance(), 3, 0, probability=probability).calibration()[0, tenth]
    assert factor == pytest.approx(20 / (20 + 24), rel=0.02)


def test_a_node_below_a_rejected_one_says_nothing() -> None:
    acceptance = Acceptance()
    acceptance.observe(record(chains(1, 5, 0.75), [0]))
    assert acceptance.calibration()[0, TENTH] == pytest.approx(20 / 21)


def test_a_drafter_that_was_written_off_comes_back() -> None:
    acceptance = after(Acceptance(), 500, 0)
    assert acceptance.calibration()[0, TENTH] < 0.05
    assert after(acceptance, 500, 6).calibration()[0, TENTH] > 0.9


def test_new_weights_make_what_was_seen_count_for_half() -> None:
    old = after(Acceptance(), 5, 0).calibration()[0, TENTH]
    acceptance = after(Acceptance(), 5, 0)
    acceptance.observe(record(empty_trees(["r0"]), [0], weights_version=1))
    kept = acceptance.calibration()[0, TENTH]
    assert kept == pytest.approx(20 / (20 + 20), rel=0.03) and kept > old
    acceptance.observe(record(empty_trees(["r0"]), [0], weights_version=1))
    assert acceptance.calibration()[0, TENTH] == kept


def test_a_drafter_with_other_weights_begins_halfway_between_its_parents_and_its_own_word() -> None:
    budget = GoodputBudget(8, 8)
    for source in (1, 2, 3):
        after(budget.acceptance, 200, 0, source=source)
    budget.renewed(1, 2)
    calibration = budget.acceptance.calibration()[:, TENTH]
    assert calibration[[0, 1, 2]].tolist() == pytest.approx([1.0, 0.5, 0.5], abs=0.01) and calibration[3] < 0.1
    after(budget.acceptance, 20, 6, source=1)
    assert budget.acceptance.calibration()[1, TENTH] > 0.85, "and what is seen of it soon outweighs that"


def test_little_that_is_known_of_a_parent_is_not_made_more() -> None:
    budget = GoodputBudget(8, 8)
    after(budget.acceptance, 2, 0, source=1)
    before = budget.acceptance.calibration()
    budget.renewed(1, 1)
    np.testing.assert_allclose(budget.acceptance.calibration(), before)
