import numpy as np
import pytest

from vllm_specrollout.cluster.simulate.workload import (
    AcceptancePlan,
    LengthPlan,
    Workload,
    constant_workload,
    draw_workload,
)
from vllm_specrollout.errors import ConfigError


def drawn(shared=0.5, with_length=0.0, common=0.5, longest=1 << 30, seed=0):
    lengths = LengthPlan(median=500.0, spread=0.7, shared=shared, longest=longest, samples=8)
    plan = AcceptancePlan(medians=(0.8, 0.4), spread=0.6, common=common, with_length=with_length)
    return draw_workload(16_000, lengths, plan, np.random.default_rng(seed))


def logits(work):
    return np.log(work.acceptance / (1 - work.acceptance))


def test_lengths_have_the_planned_median_spread_and_cap():
    work = drawn()
    assert np.median(work.length) == pytest.approx(500, rel=0.05)
    assert np.log(work.length).std() == pytest.approx(0.7, rel=0.05)
    assert drawn(longest=700).length.max() == 700


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_answers_of_a_problem_share_the_planned_part_of_the_variance(shared):
    groups = np.log(drawn(shared=shared).length).reshape(-1, 8)
    within = groups.var(axis=1, ddof=1).mean()
    assert within == pytest.approx(0.49 * (1 - shared), abs=0.03)


def test_acceptances_have_the_planned_medians_and_what_is_common_to_methods():
    found = logits(drawn(common=0.5))
    assert np.median(drawn().acceptance, axis=1) == pytest.approx([0.8, 0.4], abs=0.01)
    assert np.corrcoef(found)[0, 1] == pytest.approx(0.5, abs=0.03)


def test_long_answers_may_be_drafted_worse():
    work = drawn(with_length=-1.0, common=1.0)
    assert np.corrcoef(np.log(work.length), logits(work)[0])[0, 1] < -0.99


@pytest.mark.parametrize(
    ("length", "acceptance", "message"),
    [
        ([], [[]], "has no request"),
        ([3, 0], [[0.5, 0.5]], "without tokens"),
        ([3, 4], [[0.5]], "has shape"),
        ([3], [[1.5]], "outside 0 to 1"),
        ([3], [[float("nan")]], "outside 0 to 1"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(length, acceptance, message):
    with pytest.raises(ConfigError, match=message):
        Workload(length=np.asarray(length, dtype=np.int64), acceptance=np.asarray(acceptance))


def test_a_constant_workload_has_the_lengths_given():
    work = constant_workload([3, 5], 0.5, prompt=7)
    assert work.length.tolist() == [3, 5] and work.acceptance.tolist() == [[0.5, 0.5]] and work.prompt == 7
