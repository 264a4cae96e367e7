import msgspec
import numpy as np
import pytest
from vllm_specrollout.bench.studies.specactor import ARMS, SpecActorInputs, draw_workload, plans, run, run_arms, sites

from vllm_specrollout.cluster.rates import Mode


def smaller(**values):
    """A quarter of the cluster, answers a twentieth as long."""
    return msgspec.structs.replace(SpecActorInputs(), **{"gpus": 64, "requests": 4096, "shortened": 20, **values})


@pytest.fixture(scope="module")
def rollouts():
    return [run_arms(smaller(), seed) for seed in range(3)]


def drawn(**values):
    given = {"requests": 16_000, "shortened": 1, "median_length": 500, "longest": 1e9, "samples": 8}
    return draw_workload(smaller(**{**given, **values}), 0)


def logits(work):
    return np.log(work.acceptance / (1 - work.acceptance))


def test_lengths_have_the_planned_median_spread_and_cap():
    assert np.median(drawn().length) == pytest.approx(500, rel=0.05)
    assert np.log(drawn().length).std() == pytest.approx(0.7, rel=0.05)
    assert drawn(longest=700).length.max() == 700


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_answers_of_a_problem_share_the_planned_part_of_the_variance(shared):
    groups = np.log(drawn(length_shared=shared).length).reshape(-1, 8)
    assert groups.var(axis=1, ddof=1).mean() == pytest.approx(0.49 * (1 - shared), abs=0.03)


def test_acceptances_have_the_planned_medians_and_what_is_common_to_methods():
    work = drawn(acceptance_common=0.5)
    assert np.median(work.acceptance, axis=1) == pytest.approx([0.88, 0.90], abs=0.01)
    assert np.corrcoef(logits(work))[0, 1] == pytest.approx(0.5, abs=0.03)


def test_long_answers_may_be_drafted_worse():
    work = drawn(acceptance_with_length=-1.0, acceptance_common=1.0)
    assert np.corrcoef(np.log(work.length), logits(work)[0])[0, 1] < -0.99


def test_drafts_pay_and_disaggregation_alone_does_not_with_every_seed_and_decoupling_in_the_mean(rollouts):
    for arms in rollouts:
        assert arms["vanilla"].makespan_ms < arms["plain"].makespan_ms
        assert arms["disaggregated"].makespan_ms > arms["vanilla"].makespan_ms
        assert arms["ladder"].makespan_ms < arms["decoupled"].makespan_ms
    assert sum(arms["decoupled"].makespan_ms - arms["vanilla"].makespan_ms for arms in rollouts) < 0.0


def test_all_arms_generate_the_same_tokens(rollouts):
    for arms in rollouts:
        assert all(one.tokens == pytest.approx(arms["plain"].tokens) for one in arms.values())


def test_free_workers_lend_their_drafters_in_the_ladder_alone(rollouts):
    for arms in rollouts:
        assert [name for name, one in arms.items() if one.counts["attach"]] == ["ladder"]


def test_the_report_has_a_row_per_arm_and_says_what_does_not_come_out():
    report = run(smaller(rollouts=1, shortened=80), 0)
    assert [row[0] for row in report.tables[0].rows] == list(ARMS)
    assert sum("does not come out" in finding for finding in report.findings) == 2
    # plain types alone, as JSON wants them
    assert msgspec.to_builtins(report)["figures"]["plain s"] > report.figures["ladder s"]


def test_a_drafter_with_a_gpu_of_its_own_leaves_fewer_groups():
    arms = sites(smaller())
    assert arms["plain"].engines == arms["vanilla"].engines == 16 and arms["decoupled"].engines == 12


def test_the_products_planner_finds_that_coupled_groups_yield_most_at_first():
    inputs = SpecActorInputs()
    work = draw_workload(inputs, 0)
    found = plans(inputs, work)
    assert found[0].mode is Mode.COUPLED
    assert found[0].total_tokens_per_s > found[1].total_tokens_per_s
    dear = msgspec.structs.replace(inputs, row_ms=0.08)
    assert plans(dear, work)[0].mode is Mode.PLAIN, "rows may cost more beyond the knee than the weights below it"
