import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.budgets.builders import timing
from vllm_specrollout.budgets.step_cost import GROWTH, CostLine, StepCost


def line(num_requests: int, num_nodes: int, branches: int = 0) -> float:
    return 4.0 + 0.05 * (num_requests + num_nodes) + (0.5 + 0.01 * branches if num_nodes else 0.0)


def learned(sizes: list[tuple[int, int]]) -> StepCost:
    cost = StepCost()
    for num_requests, num_nodes in sizes:
        cost.observe(timing(num_requests, num_nodes, line(num_requests, num_nodes)))
    return cost


MIXED = [(8, 0), (8, 32), (8, 96), (8, 0), (8, 64), (8, 16)] * 10


@pytest.mark.parametrize("is_seeded", [False, True], ids=["no profile", "an empty one"])
def test_nothing_is_assumed_of_a_step_before_one_is_seen(is_seeded: bool) -> None:
    cost = StepCost()
    if is_seeded:
        cost.seed([])
    assert not cost.is_known
    assert cost.plain_ms(8) == cost.plain_ms(64) == cost.predict(8, 20) == 1.0
    added = cost.added_ms(8, 100)
    # rows cost nothing as far as they may be tried
    assert (added[: 8 * GROWTH - 8 + 1] == 0.0).all() and np.isinf(added[8 * GROWTH - 8 + 1 :]).all()


def test_a_line_is_found_in_steps_that_lie_on_it_and_goes_on_straight_to_smaller_batches_and_more_nodes() -> None:
    cost = learned(MIXED)
    for num_requests, within in ((8, 0.02), (6, 0.1), (4, 0.1), (2, 0.1)):
        assert cost.plain_ms(num_requests) == pytest.approx(line(num_requests, 0), rel=within)
    added = cost.added_ms(8, 300)
    for nodes, within in ((8, 0.15), (24, 0.15), (48, 0.15), (96, 0.15), (300, 0.25)):
        assert added[nodes] == pytest.approx(line(8, nodes) - line(8, 0), rel=within)
    for nodes in (8, 24, 48, 96):
        assert cost.predict(8, nodes) == pytest.approx(line(8, nodes), rel=0.02)


def test_what_a_branch_costs_is_told_from_what_a_node_costs() -> None:
    cost = StepCost()
    for i in range(120):
        nodes, branches = 8 * (i % 9), (i * 7) % 30 if i % 9 else 0
        cost.observe(timing(8, nodes, line(8, nodes, branches), branches=branches))
    assert cost.branch_ms == pytest.approx(0.01, rel=0.3)


def test_a_knee_is_seen_where_it_is() -> None:
    def ms(rows: int) -> float:
        return 8.0 + 0.1 * max(rows - 256, 0)

    cost = StepCost()
    for nodes in [0, 64, 192, 448, 128, 256] * 20:
        cost.observe(timing(64, nodes, ms(64 + nodes)))
    added = cost.added_ms(64, 448)
    assert added[192] < 1.0
    assert added[448] == pytest.approx(ms(512) - ms(64), rel=0.1)


@given(
    st.lists(st.tuples(st.integers(1, 256), st.integers(0, 2048), st.floats(0.1, 500.0)), max_size=20),
    st.integers(1, 300),
    st.integers(0, 600),
)
@settings(max_examples=50, deadline=None)
def test_more_nodes_never_cost_less_whatever_was_measured(steps, num_requests: int, num_nodes: int) -> None:
    cost = StepCost()
    for seen_requests, seen_nodes, ms in steps:
        cost.observe(timing(seen_requests, seen_nodes, ms))
    added = cost.added_ms(num_requests, num_nodes)
    assert len(added) == num_nodes + 1 and added[0] == 0.0
    assert all(a <= b for a, b in pairwise(added.tolist()))
    assert cost.plain_ms(num_requests) > 0.0 and cost.branch_ms >= 0.0


def test_rows_far_beyond_all_tried_cost_infinitely_much() -> None:
    cost = learned([(8, 0), (8, 24)])
    added = cost.added_ms(8, 500)
    assert np.isfinite(added[GROWTH * 32 - 8]) and np.isinf(added[GROWTH * 32 - 8 + 1])
    # and a wide step moves that bound
    cost.observe(timing(8, 120, line(8, 120)))
    assert np.isfinite(cost.added_ms(8, 500)[-1])


def test_steps_with_prompts_are_left_out() -> None:
    cost, before = learned(MIXED), learned(MIXED).plain_ms(8)
    cost.observe(timing(8, 0, 500.0, is_decode_only=False))
    assert cost.plain_ms(8) == before


def test_asking_drafters_is_no_part_of_a_step() -> None:
    asked, alone = StepCost(), StepCost()
    asked.observe(timing(4, 8, 12.0, ask_ms=2.0))
    alone.observe(timing(4, 8, 10.0))
    assert asked.predict(4, 8) == pytest.approx(alone.predict(4, 8))


def test_noise_and_disturbed_steps_move_a_prediction_by_little() -> None:
    rng = np.random.default_rng(0)
    cost = StepCost()
    for i in range(300):
        num_nodes = (0, 32, 96, 64, 16)[i % 5]
        disturbed = 3.0 if rng.random() < 0.02 else 1.0
        cost.observe(timing(8, num_nodes, line(8, num_nodes) * math.exp(0.05 * rng.standard_normal()) * disturbed))
    for nodes in (0, 16, 64, 96):
        assert cost.predict(8, nodes) == pytest.approx(line(8, nodes), rel=0.06)


def test_a_disturbed_plain_step_does_not_make_wider_ones_slower() -> None:
    cost = StepCost()
    cost.observe(timing(64, 0, 24.0))
    for _ in range(6):
        cost.observe(timing(64, 192, 9.0))
    assert cost.predict(64, 192) == pytest.approx(9.0, rel=0.1)
    assert cost.plain_ms(64) <= cost.predict(64, 192)


@pytest.mark.parametrize("factor", [0.5, 1.6])
def test_an_engine_that_changes_its_speed_is_followed_in_a_dozen_steps(factor: float) -> None:
    cost = learned(MIXED)
    for _ in range(12):
        cost.observe(timing(8, 64, factor * line(8, 64)))
    # also where nothing was measured since
    assert cost.plain_ms(8) == pytest.approx(factor * line(8, 0), rel=0.1)
    assert cost.predict(8, 96) == pytest.approx(factor * line(8, 96), rel=0.1)


def test_a_saved_profile_is_where_a_new_engine_starts() -> None:
    cost = StepCost()
    cost.seed([timing(n, k, line(n, k)) for n, k in MIXED])
    assert cost.is_known and cost.plain_ms(8) == pytest.approx(line(8, 0), rel=0.02)
    # and fades as it goes on
    for _ in range(80):
        cost.observe(timing(8, 0, 1.1 * line(8, 0)))
    assert cost.plain_ms(8) == pytest.approx(1.1 * line(8, 0), rel=0.03)


def test_a_line_bends_at_the_places_that_all_lines_bend_at() -> None:
    with pytest.raises(ValueError, match="bends at 1 places, not at 18"):
        CostLine(rows=(1.0,))
