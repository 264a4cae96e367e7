"""The rollout benchmark's arithmetic: how many run when, and what its steps would cost stock."""

import pytest

from bench.policy.reward import problems
from bench.runner.rows import extend_sizes, ideal_rollout_speedup, row_times, running
from bench.scenarios.rollout import Rollout
from vllm_specrollout.config import parse


@pytest.fixture
def shrinking(make_run):
    """Four requests, two at once; they end with steps 2, 4, 6 and 9."""
    return make_run([[0]] * 4, [float(i) for i in range(1, 10)], [2.0, 4.0, 6.0, 9.0])


def test_as_many_run_as_have_not_ended_up_to_the_batch(shrinking):
    assert running(shrinking, 2) == [2, 2, 2, 2, 2, 1, 1, 1]


def test_rows_cost_what_stock_needs_for_them(shrinking):
    times = row_times([shrinking], 2, {1: [5.0], 4: [405.0]})
    assert times == {1: 1000.0, 2: 1000.0, 8: 1400.0}


def test_too_few_steps_give_no_times(make_run):
    assert row_times([make_run([[0, 0]], [1.0, 2.0])], 1, {1: [1.0]}) == {}


def test_the_ideal_charges_the_steps_of_both_the_same_prices(make_run, shrinking):
    ours = make_run([[0]], [1.0], steps=4, by_rows={1: (1, 99.0), 8: (1, 99.0)})
    # stock: 6 steps with two requests running (the prompts' step is one of them) and 3 with one; ours: a step of 1 row
    # and one of 8 on record, and two others, which computed prompts too and cost the mean
    ideal = ideal_rollout_speedup(shrinking, ours.totals, 2, {1: 10.0, 2: 12.0, 8: 14.0})
    assert ideal == pytest.approx((6 * 12.0 + 3 * 10.0) / (2 * 24.0))


def test_no_recorded_steps_give_no_ideal(make_run, shrinking):
    assert ideal_rollout_speedup(shrinking, make_run([[0]], [1.0], steps=6).totals, 2, {1: 1.0}) is None


def test_step_times_are_measured_up_to_the_widest_step(make_run):
    def sizes(widest):
        return extend_sizes(8, make_run([[0]], [1.0], steps=1, by_rows={widest: (1, 1.0)}).totals)

    assert sizes(8) == [1]
    assert sizes(9) == [1, 2]
    assert sizes(8 * 25) == [1, 2, 4, 8, 16, 32]


def test_samples_of_a_problem_share_its_id_and_no_seed():
    plan = Rollout(prompts=3, samples=2, seed=1)
    chosen = problems(3, 1)
    ours = plan.params(chosen, is_ours=True)
    ids = [values.pop("extra_args")["spec_rollout"]["problem_id"] for values in ours]
    assert ids == [problem.problem_id for problem in chosen for _ in range(2)]
    assert len({values["seed"] for values in ours}) == 6
    assert ours == plan.params(chosen, is_ours=False)


def test_the_settings_are_a_configuration_our_engine_takes():
    assert parse(Rollout(max_draft_tokens=5).spec_rollout()).max_draft_tokens == 5
