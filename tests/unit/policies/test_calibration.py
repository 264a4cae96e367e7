"""Calibration: a drafter that boasts is believed less, one that is modest more."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specrollout.policies.calibration import Calibration
from vllm_specrollout.types import DraftTree, Feedback


def _tree(probability: float, source: int = 0) -> DraftTree:
    return DraftTree(
        np.zeros(1, np.int32),
        np.asarray([-1], np.int32),
        np.log(np.asarray([probability], np.float32)),
        np.asarray([source], np.int32),
    )


def _feedback(probability: float, accepted: bool, source: int = 0) -> Feedback:
    tree = _tree(probability, source)
    nodes = np.asarray([0] if accepted else [], np.int32)
    return Feedback("r", 1, len(nodes), tree.parents, tree.source, tree.log_q, nodes)


@pytest.mark.parametrize(("claimed", "true"), [(0.9, 0.3), (0.35, 0.8), (0.5, 0.5)])
def test_probabilities_move_to_what_is_observed(claimed: float, true: float) -> None:
    rng, calibration = np.random.default_rng(1), Calibration()
    for _ in range(3000):
        calibration.observe([_feedback(claimed, bool(rng.random() < true))])
    assert np.exp(calibration.log_probability(_tree(claimed)))[0] == pytest.approx(true, abs=0.06)


def test_a_drafter_is_believed_until_it_is_observed() -> None:
    assert np.exp(Calibration().log_probability(_tree(0.7)))[0] == pytest.approx(0.7)


def test_drafters_are_judged_apart() -> None:
    calibration = Calibration()
    for _ in range(500):
        calibration.observe([_feedback(0.8, False, source=1)])
    assert np.exp(calibration.log_probability(_tree(0.8, source=0)))[0] == pytest.approx(0.8)
    assert np.exp(calibration.log_probability(_tree(0.8, source=1)))[0] < 0.1


def test_nodes_the_target_never_reached_say_nothing() -> None:
    """A child of a rejected node was not tested, so it counts neither for nor against its drafter."""
    calibration = Calibration()
    log_q = np.log(np.asarray([0.5, 0.9], np.float32))
    parents, source = np.asarray([-1, 0], np.int32), np.zeros(2, np.int32)
    for _ in range(500):
        calibration.observe([Feedback("r", 2, 0, parents, source, log_q, np.empty(0, np.int32))])
    assert np.exp(calibration.log_probability(_tree(0.9)))[0] == pytest.approx(0.9)
