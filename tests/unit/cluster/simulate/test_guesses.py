import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.cluster.simulate.guesses import Guesses
from vllm_specrollout.cluster.simulate.workload import Workload, constant_workload


def guesses_of(work, methods=1, seed=0):
    return Guesses(work, methods, np.random.default_rng(seed))


@pytest.mark.parametrize(("p", "window"), [(0.3, 1), (0.6, 4), (0.9, 8)])
def test_runs_have_the_lengths_of_independent_guesses(p, window):
    work = constant_workload([200] * 1000, p)
    places = np.repeat(np.arange(1000), 10)
    runs = guesses_of(work).accepted(0, places, np.tile(np.arange(0, 200, 20), 1000), np.full(10_000, window))
    for length in range(window + 1):
        expected = p**length * (1 - p if length < window else 1.0)
        assert (runs == length).mean() == pytest.approx(expected, abs=0.02)


@given(st.floats(0.0, 1.0), st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_a_run_is_one_longer_than_the_next_positions_or_empty(p, lengths, seed):
    work = constant_workload(lengths, p)
    found = guesses_of(work, seed=seed)
    for request, length in enumerate(lengths):
        runs = found.run(0, np.full(length, request), np.arange(length))
        assert all(run == 0 or run == after + 1 for run, after in zip(runs[:-1], runs[1:], strict=True))
        if p == 0.0:
            assert not runs.any()


def test_one_more_method_changes_no_other():
    work = Workload(length=np.asarray([500]), acceptance=np.asarray([[0.7], [0.4]]))
    positions = np.arange(500)
    alone, both = guesses_of(work, 1), guesses_of(work, 2)
    first = [one.run(0, np.zeros(500, dtype=np.int64), positions).tolist() for one in (alone, both)]
    assert first[0] == first[1]
