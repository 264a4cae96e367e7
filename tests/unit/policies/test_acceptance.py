"""Acceptance: a drafter that boasts is believed less, one that is modest more; each request on its own record."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specrollout.policies.acceptance import Acceptance
from vllm_specrollout.policies.pick import depth_range, probability_bucket
from vllm_specrollout.types import Feedback, RequestView


def _view(request_id: str, problem_id: str = "") -> RequestView:
    return RequestView(request_id, np.zeros(4, np.int32), 2, 100, problem_id=problem_id)


def _feedback(q: float, accepted: bool, *, source: int = 0, request_id: str = "r") -> Feedback:
    nodes = np.asarray([0] if accepted else [], np.int32)
    columns = (np.asarray([-1], np.int32), np.asarray([source], np.int32), np.log(np.asarray([q], np.float32)))
    return Feedback(request_id, 1, len(nodes), *columns, nodes)


def _chain_feedback(q: float, length: int, accepted: int, request_id: str = "r") -> Feedback:
    return Feedback(
        request_id,
        length,
        accepted,
        np.arange(-1, length - 1, dtype=np.int32),
        np.zeros(length, np.int32),
        np.full(length, np.log(q), np.float32),
        np.arange(accepted, dtype=np.int32),
    )


def _estimate(acceptance: Acceptance, q: float, *, source: int = 0, depth: int = 1, request_id: str = "") -> float:
    by_bucket, by_depth = acceptance.tables()
    q = float(np.exp(np.float64(np.log(np.float32(q)))))  # as a tree holds it
    corrected = q * by_bucket[source, probability_bucket(q)] * by_depth[source, depth_range(depth)]
    return float(corrected * acceptance.factor(request_id))


@pytest.mark.parametrize(("claimed", "true"), [(0.9, 0.3), (0.35, 0.8), (0.5, 0.5), (0.7, 0.02)])
def test_estimates_move_to_what_is_observed(claimed: float, true: float) -> None:
    rng, acceptance = np.random.default_rng(1), Acceptance()
    for _ in range(3000):
        acceptance.observe([_feedback(claimed, bool(rng.random() < true))])
    assert _estimate(acceptance, claimed) == pytest.approx(true, abs=0.06)


def test_a_drafter_is_believed_until_it_is_observed() -> None:
    assert _estimate(Acceptance(), 0.7, depth=3) == pytest.approx(0.7)


def test_drafters_are_judged_apart() -> None:
    acceptance = Acceptance()
    for _ in range(500):
        acceptance.observe([_feedback(0.8, False, source=1)])
    assert _estimate(acceptance, 0.8, source=0) == pytest.approx(0.8)
    assert _estimate(acceptance, 0.8, source=1) < 0.1


def test_drafts_that_fade_with_depth_are_believed_less_there() -> None:
    """The first level is always right, the second always wrong: the word for both was 0.9."""
    acceptance = Acceptance()
    for _ in range(400):
        acceptance.observe([_chain_feedback(0.9, 2, 1)])
    assert _estimate(acceptance, 0.9, depth=1) > 2.0 * _estimate(acceptance, 0.9, depth=2)


def test_nodes_the_target_never_reached_say_nothing() -> None:
    """A child of a rejected node was not tested, so it counts neither for nor against its drafter."""
    acceptance = Acceptance()
    log_q = np.log(np.asarray([0.5, 0.9], np.float32))
    parents, source = np.asarray([-1, 0], np.int32), np.zeros(2, np.int32)
    for _ in range(500):
        acceptance.observe([Feedback("r", 2, 0, parents, source, log_q, np.empty(0, np.int32))])
    by_bucket, _ = acceptance.tables()
    assert by_bucket[0, probability_bucket(0.9)] == pytest.approx(1.0)


def test_where_requests_are_alike_luck_counts_less_than_where_they_differ() -> None:
    rng = np.random.default_rng(0)

    def prior(accuracies: list[float]) -> float:
        acceptance = Acceptance()
        for i in range(len(accuracies)):
            acceptance.meet(_view(f"r{i}", f"p{i}"))
        for _ in range(150):
            runs = [min(int(rng.geometric(1.0 - accuracy)) - 1, 4) for accuracy in accuracies]
            acceptance.observe([_chain_feedback(0.7, 4, run, f"r{i}") for i, run in enumerate(runs)])
        return acceptance.request_prior

    assert prior([0.4, 0.9] * 4) < 15.0 < 40.0 < prior([0.7] * 8)


def test_a_hard_request_is_told_from_its_batch_and_leaves_a_note_for_its_problem() -> None:
    acceptance = Acceptance()
    for name, problem in (("easy", "p"), ("hard", "q")):
        acceptance.meet(_view(name, problem))
    for _ in range(60):
        acceptance.observe([_chain_feedback(0.7, 4, 4, "easy"), _chain_feedback(0.7, 4, 0, "hard")])
    assert acceptance.factor("hard") < 0.5 < 1.0 < acceptance.factor("easy")
    acceptance.finish("hard", "q")
    assert acceptance.factor("hard") == 1.0
    acceptance.meet(_view("next", "q"))
    assert acceptance.factor("next") < 0.8
    acceptance.meet(_view("other", "unknown"))
    assert acceptance.factor("other") == 1.0


def test_new_weights_make_all_that_was_learned_count_half() -> None:
    acceptance = Acceptance()
    acceptance.meet(_view("r"))
    for _ in range(100):
        acceptance.observe([_feedback(0.8, False)])
    before, factor = _estimate(acceptance, 0.8), acceptance.factor("r")
    acceptance.weights_are(1)
    after = _estimate(acceptance, 0.8)
    assert before < after < 0.8
    assert factor <= acceptance.factor("r") <= 1.0
    acceptance.weights_are(1)
    assert _estimate(acceptance, 0.8) == after


def test_a_drafter_written_off_is_believed_again_in_time() -> None:
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.observe([_feedback(0.9, False)])
    low = _estimate(acceptance, 0.9)
    for _ in range(6000):  # another drafter works meanwhile
        acceptance.observe([_feedback(0.5, True, source=1)])
    assert low < 0.15 < 0.3 < _estimate(acceptance, 0.9)
