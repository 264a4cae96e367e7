from dataclasses import replace

import pytest

from vllm_specrollout.cluster.simulate.inputs import load
from vllm_specrollout.cluster.simulate.studies.specactor import ARMS, run, run_arms, setups, workload_of
from vllm_specrollout.cluster.simulate.studies.specactor_scan import exact_rate, scan

INPUTS = load("specactor")


def smaller(**values):
    """A quarter of the cluster, answers a twentieth as long."""
    changed = {"gpus": 64.0, "requests": 4096.0, "shortened": 20.0, **values}
    given = {name: replace(INPUTS.inputs[name], value=value) for name, value in changed.items()}
    return replace(INPUTS, inputs={**INPUTS.inputs, **given})


@pytest.fixture(scope="module")
def rollouts():
    return [run_arms(smaller(), seed) for seed in range(3)]


def mean_ms(rollouts, arm):
    return sum(arms[arm].makespan_ms for arms in rollouts) / len(rollouts)


@pytest.mark.nightly
def test_over_several_seeds_each_technique_adds_to_the_one_before_it(rollouts):
    order = ("plain", "vanilla", "decoupled", "reconfigured", "ladder")
    times = [mean_ms(rollouts, name) for name in order]
    assert times == sorted(times, reverse=True)


def test_drafts_pay_and_disaggregation_alone_does_not_with_every_seed(rollouts):
    for arms in rollouts:
        assert arms["vanilla"].makespan_ms < arms["plain"].makespan_ms
        assert arms["disaggregated"].makespan_ms > arms["vanilla"].makespan_ms
        assert arms["ladder"].makespan_ms < arms["decoupled"].makespan_ms


def test_decoding_plainly_beats_waiting(rollouts):
    assert mean_ms(rollouts, "decoupled") < mean_ms(rollouts, "decoupled, waiting")


def test_all_arms_generate_the_same_tokens_and_waste_within_the_bound(rollouts):
    for arms in rollouts:
        assert len({outcome.tokens for outcome in arms.values()}) == 1
        assert all(outcome.counts.excess == 0 for outcome in arms.values())


def test_the_ladder_puts_idle_groups_to_work(rollouts):
    for arms in rollouts:
        assert arms["ladder"].idle_share < arms["reconfigured"].idle_share - 0.1
        assert arms["ladder"].races_won > 0


def test_the_report_has_a_row_and_a_curve_per_arm_and_says_what_does_not_come_out():
    report = run(smaller(rollouts=1.0, shortened=80.0), 0)
    assert [row[0] for row in report.tables[0].rows] == list(ARMS) == [curve.label for curve in report.curves]
    assert all(curve.y[0] == 4096 and curve.y[-1] == 0 for curve in report.curves)
    assert sum("does not come out" in finding for finding in report.findings) == 2
    assert report.as_dict()["figures"]["plain s"] > report.figures["ladder s"]


def test_windows_are_planned_for_the_batch_at_the_beginning():
    planned = setups(smaller(), workload_of(smaller(), 0))
    assert planned["plain"].groups == 16 and planned["decoupled"].groups == 12
    assert planned["vanilla"].window <= planned["decoupled"].window


def test_a_batch_of_256_wins_1_3_times_only_by_the_printed_tau_or_nearly_free_rows():
    _, findings, figures = scan(INPUTS)
    assert figures["best gain, exact"] < 1.3 < figures["best gain, paper"]
    assert len(findings) == 3 and "in none of 100 cases" in findings[1]


def test_exact_speed_of_a_window_that_is_always_right():
    from vllm_specrollout.cluster.simulate.step_line import StepLine

    assert exact_rate(StepLine(base=1.0), StepLine(base=10.0), 1, 4, 1.0) == pytest.approx(0.4)
