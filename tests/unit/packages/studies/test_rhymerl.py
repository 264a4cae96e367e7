import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_specrollout.bench.studies.rhymerl import TABLE_2, RhymeRLInputs, epochs, growth, ranked, ranks, run

INPUTS = RhymeRLInputs()
SMALL = msgspec.structs.replace(INPUTS, problems=512, samples=8)


@given(forecasts=st.dictionaries(st.text(max_size=3), st.integers(0, 99)), count=st.integers(1, 6))
def test_ranks_hold_each_problem_once_in_order_and_are_alike_in_size(forecasts, count):
    found = ranks(forecasts, count)
    flat = [problem for rank in found for problem in rank]
    assert sorted(flat) == sorted(forecasts) and len(found) == count
    assert [forecasts[problem] for problem in flat] == sorted(forecasts.values())
    sizes = [len(rank) for rank in found]
    assert max(sizes) - min(sizes) <= 1


def test_growth_is_the_third_quartile_and_never_below_a_tenth():
    before = dict.fromkeys("abcd", 10.0)
    assert growth(before, {"a": 10.0, "b": 12.0, "c": 14.0, "d": 20.0}) == pytest.approx(1.85)
    assert growth(before, dict.fromkeys("abcd", 9.0)) == growth({}, {"a": 5.0}) == 1.1


def test_answers_that_are_all_alike_are_ranked_right_and_none_migrates():
    assert ranked(SMALL, 0.0, 8, 0) == pytest.approx((100.0, 0.0, 0.0, 0.0))


@pytest.mark.parametrize(("dataset", "spread"), list(zip(("first", "second", "third"), INPUTS.own_spread, strict=True)))
def test_spreads_fitted_to_8_ranks_predict_the_accuracy_with_16(dataset, spread):
    eight, sixteen = (ranked(INPUTS, spread, count, 0) for count in (8, 16))
    assert sum(eight) == pytest.approx(100.0) and min(eight) >= 0.0
    assert eight[0] == pytest.approx(TABLE_2[dataset, 8][0], rel=0.01)
    assert sixteen[0] == pytest.approx(TABLE_2[dataset, 16][0], rel=0.15)


def test_epochs_have_the_same_problems_and_answers_of_their_own():
    before, now = epochs(INPUTS, 0.2, np.random.default_rng(0), 400)
    assert np.corrcoef(np.log(before.mean(axis=1)), np.log(now.mean(axis=1)))[0, 1] > 0.95
    assert (before != now).mean() > 0.9 and now.max() <= INPUTS.longest


def test_the_report_marks_what_was_fitted():
    (table,) = run(SMALL, 0).tables
    assert len(table.rows) == 6 and sum(str(cell).endswith("*") for row in table.rows for cell in row) == 3
