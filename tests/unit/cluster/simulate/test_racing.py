from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.cluster.simulate.racing import Race, assign
from vllm_specrollout.decoupled.assignment import rarest


def test_a_freed_group_takes_the_method_with_fewest_groups():
    assert rarest(range(3), {0: 5, 1: 1, 2: 0}) == 2
    assert rarest(range(3), {0: 1}) == 1
    assert rarest(range(3), {}) == 0


def test_the_lowest_acceptance_is_raced_for_first():
    rates = {10: 0.9, 11: 0.2, 12: 0.5}
    assert assign(rates, {3: 1}, {}, set(), 2) == [Race(11, 1, 3), Race(12, 1, 3)]


def test_a_request_gets_a_method_once_and_several_methods():
    rates = {10: 0.1, 11: 0.2}
    found = assign(rates, {3: 1, 4: 1, 5: 2}, {}, {(10, 2)}, 1)
    assert found == [Race(10, 1, 3), Race(11, 1, 4), Race(11, 2, 5)]


@given(
    st.dictionaries(st.integers(0, 30), st.floats(0.0, 1.0), max_size=20),
    st.dictionaries(st.integers(0, 9), st.integers(0, 2), max_size=8),
    st.dictionaries(st.integers(0, 9), st.integers(0, 6)),
    st.sets(st.tuples(st.integers(0, 30), st.integers(0, 2))),
    st.integers(1, 5),
)
def test_no_group_is_overfilled_and_no_pair_runs_twice(rates, racing, loads, taken, most):
    found = assign(rates, racing, loads, taken, most)
    for group, method in racing.items():
        mine = [race for race in found if race.group == group]
        assert all(race.method == method for race in mine)
        assert not mine or len(mine) + loads.get(group, 0) <= most
    pairs = [(race.request, race.method) for race in found]
    assert len(set(pairs)) == len(pairs) and not set(pairs) & taken
    assert {request for request, _ in pairs} <= set(rates)
