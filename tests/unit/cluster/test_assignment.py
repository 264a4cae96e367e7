from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.reference import decoupled_plan as naive
from vllm_specrollout.cluster.assignment import Lender, Worker, assign, lend

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


WORKERS = ("w0", "w1", "w2")
LENDERS = st.dictionaries(
    st.sampled_from([f"l{i}" for i in range(6)]),
    st.builds(
        lambda method, to, count: Lender(method, to, tuple(f"{to}-{i}" for i in range(count)) if to else ()),
        st.sampled_from(METHODS),
        st.sampled_from(["", "", *WORKERS]),
        st.integers(1, 3),
    ),
)
RUNNING = st.fixed_dictionaries({}, optional={worker: st.lists(st.floats(0.0, 1.0), max_size=4) for worker in WORKERS})


@given(rates=RUNNING, lenders=LENDERS, most=st.integers(1, 4))
def test_whatever_is_lent_the_promises_hold(rates, lenders, most) -> None:
    running = {worker: {f"{worker}-{i}": rate for i, rate in enumerate(own)} for worker, own in rates.items()}
    lenders = {
        name: one for name, one in lenders.items() if not one.to or set(one.requests) <= set(running.get(one.to, {}))
    }
    found = lend(running, lenders, most=most)
    after = {**lenders, **found}
    for name, one in found.items():
        before = lenders[name]
        assert one.method == before.method and one.to and before.to in ("", one.to), "a drafter drafts for one worker"
        assert set(before.requests) < set(one.requests) <= set(running[one.to]), "it keeps what it has"
        assert len(one.requests) <= most
    for worker, own in running.items():
        for request in own:
            methods = [one.method for one in found.values() if one.to == worker and request in one.requests]
            methods += [one.method for one in lenders.values() if one.to == worker and request in one.requests]
            new = [
                one.method
                for name, one in found.items()
                if one.to == worker and request in one.requests and request not in lenders[name].requests
            ]
            assert len(set(new)) == len(new), "two of one method would draft the same"
    # nothing is left idle that somebody lacks
    for one in after.values():
        lacking = [
            request
            for worker, own in running.items()
            for request in own
            if not any(o.method == one.method and o.to == worker and request in o.requests for o in after.values())
        ]
        assert one.to or not lacking
    again = lend(running, after, most=most)
    assert not again, "once is enough"


def test_the_worst_request_gets_all_methods_that_are_lent_before_the_next() -> None:
    lenders = {name: Lender(method) for name, method in (("x", "small"), ("y", "large"), ("z", "ngram"))}
    found = lend({"w0": {"good": 0.9}, "w1": {"bad": 0.1}}, lenders, most=4)
    assert {(name, one.to, one.requests) for name, one in found.items()} == {
        ("x", "w1", ("bad",)), ("y", "w1", ("bad",)), ("z", "w1", ("bad",)),
    }  # fmt: skip


def test_a_lent_drafter_serves_its_own_worker_to_the_brim_before_a_last_free_one_leaves() -> None:
    lenders = {"x": Lender("small", "w0", ("a",)), "y": Lender("small")}
    running = {"w0": {"a": 0.5, "b": 0.1}, "w1": {"c": 0.9}}
    assert lend(running, lenders, most=2) == {
        "x": Lender("small", "w0", ("a", "b")), "y": Lender("small", "w1", ("c",)),
    }  # fmt: skip
    assert lend(running, lenders, most=1) == {"y": Lender("small", "w0", ("b",))}
