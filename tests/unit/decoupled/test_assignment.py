from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import decoupled_plan as naive
from vllm_specrollout.decoupled.assignment import Worker, assign
from vllm_specrollout.errors import ConfigError

METHODS = ("small", "large", "ngram")


def test_freed_workers_get_the_rarest_methods() -> None:
    workers = {"w0": Worker("small"), "w1": Worker("small"), "w2": Worker("large")}
    found = assign({}, METHODS, ["f0", "f1", "f2"], workers, most=4)
    assert found.methods == {"f0": "ngram", "f1": "large", "f2": "ngram"}


def test_the_worst_request_gets_all_methods_before_the_next() -> None:
    """The text's order; the printed loops would give `small` to all three first."""
    found = assign({"a": 0.9, "b": 0.2, "c": 0.5}, METHODS, ["f0", "f1", "f2"], {}, most=1)
    assert found.pairs == {("b", "small"): "f0", ("b", "large"): "f1", ("b", "ngram"): "f2"}
    assert found.left_out == ("c", "a")


def test_what_a_request_has_already_is_not_given_again() -> None:
    found = assign({"a": 0.2}, METHODS, ["f0", "f1"], {"w0": Worker("small", 3)}, most=4, running={("a", "small")})
    assert found.pairs == {("a", "large"): "f0", ("a", "ngram"): "f1"}
    everything = {("a", method) for method in METHODS}
    assert assign({"a": 0.2}, METHODS, ["f0"], {}, most=4, running=everything).left_out == ()


def test_a_full_method_is_skipped_for_a_request() -> None:
    workers = {"w0": Worker("small", 2), "w1": Worker("large", 0)}
    found = assign({"a": 0.2}, METHODS, [], workers, most=2)
    assert found.pairs == {("a", "large"): "w1"}
    assert found.left_out == ()


def test_requests_go_to_the_least_loaded_worker_of_a_method() -> None:
    workers = {"w0": Worker("small", 2), "w1": Worker("small", 0)}
    found = assign({"a": 0.1, "b": 0.2, "c": 0.3}, ["small"], [], workers, most=4)
    assert found.pairs == {("a", "small"): "w1", ("b", "small"): "w1", ("c", "small"): "w0"}


def test_without_workers_everybody_is_left_out() -> None:
    assert assign({"a": 0.3, "b": 0.1}, METHODS, [], {}, most=1).left_out == ("b", "a")


names = st.integers(0, 5).map("r{}".format)


@given(
    acceptance=st.dictionaries(names, st.floats(0.0, 1.0)),
    methods=st.lists(st.sampled_from(METHODS), min_size=1, unique=True),
    freed=st.lists(st.sampled_from(["f0", "f1", "f2", "f3"]), unique=True),
    loads=st.lists(st.tuples(st.sampled_from(METHODS), st.integers(0, 4)), max_size=4),
    most=st.integers(1, 4),
    running=st.sets(st.tuples(names, st.sampled_from(METHODS))),
)
def test_it_does_what_the_text_says(acceptance, methods, freed, loads, most, running) -> None:
    workers = {f"w{i}": Worker(*load) for i, load in enumerate(loads)}
    found = assign(acceptance, methods, freed, workers, most=most, running=running)
    after, pairs = naive.assign(
        acceptance, methods, freed, [(name, w.method, w.load) for name, w in workers.items()], most, running
    )
    assert found.pairs == pairs
    assert found.methods == {name: method for name, method, _ in after if name in freed}
    assert all(load <= max(most, *(w.load for w in workers.values()), 0) for _, _, load in after)
    assert not {request for request, _ in pairs} & set(found.left_out)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"methods": []}, "no drafting method is given, or one twice"),
        ({"methods": ["a", "a"]}, "no drafting method is given, or one twice"),
        ({"freed": ["w0"]}, "a freed worker is named twice, or has a method already"),
        ({"most": 0}, "a worker may serve 0 requests"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict, cause: str) -> None:
    sound = {"methods": ["a"], "freed": ["f0"], "workers": {"w0": Worker("a")}, "most": 1}
    with pytest.raises(ConfigError) as caught:
        assign({}, **{**sound, **options})
    assert caught.value.cause == cause
