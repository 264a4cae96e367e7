from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.reference import decoupled_plan as naive
from vllm_specrollout.cluster.assignment import Worker, assign

METHODS = ("small", "large", "ngram")


def test_the_worst_request_gets_all_methods_before_the_next() -> None:
    """The text's order; the printed loops would give `small` to all three first."""
    workers = {method: Worker(method) for method in METHODS}
    found = assign({"a": 0.9, "b": 0.2, "c": 0.5}, METHODS, workers, most=1)
    assert found == {("b", method): method for method in METHODS}


def test_what_a_request_has_already_is_not_given_again() -> None:
    workers = {method: Worker(method) for method in METHODS}
    found = assign({"a": 0.2}, METHODS, workers, most=4, running={("a", "small")})
    assert found == {("a", "large"): "large", ("a", "ngram"): "ngram"}
    assert assign({"a": 0.2}, METHODS, workers, most=4, running={("a", method) for method in METHODS}) == {}


def test_a_full_method_is_skipped_for_a_request() -> None:
    workers = {"w0": Worker("small", 2), "w1": Worker("large", 0)}
    assert assign({"a": 0.2}, METHODS, workers, most=2) == {("a", "large"): "w1"}


def test_requests_go_to_the_least_loaded_worker_of_a_method() -> None:
    workers = {"w0": Worker("small", 2), "w1": Worker("small", 0)}
    found = assign({"a": 0.1, "b": 0.2, "c": 0.3}, ["small"], workers, most=4)
    assert found == {("a", "small"): "w1", ("b", "small"): "w1", ("c", "small"): "w0"}


def test_without_workers_nobody_is_served() -> None:
    assert assign({"a": 0.3, "b": 0.1}, METHODS, {}, most=1) == {}


names = st.integers(0, 5).map("r{}".format)


@given(
    acceptance=st.dictionaries(names, st.floats(0.0, 1.0)),
    methods=st.lists(st.sampled_from(METHODS), min_size=1, unique=True),
    loads=st.lists(st.tuples(st.sampled_from(METHODS), st.integers(0, 4)), max_size=4),
    most=st.integers(1, 4),
    running=st.sets(st.tuples(names, st.sampled_from(METHODS))),
)
def test_it_does_what_the_text_says(acceptance, methods, loads, most, running) -> None:
    workers = {f"w{i}": Worker(*load) for i, load in enumerate(loads)}
    found = assign(acceptance, methods, workers, most=most, running=running)
    after, pairs = naive.assign(
        acceptance, methods, [(name, w.method, w.load) for name, w in workers.items()], most, running
    )
    assert found == pairs
    assert all(method == workers[worker].method for (_, method), worker in found.items())
    assert all(load <= max(most, *(w.load for w in workers.values()), 0) for _, _, load in after)
