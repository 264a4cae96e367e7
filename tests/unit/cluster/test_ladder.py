"""What a group decides, case by case; test_driver.py and test_lending.py have it under random schedules."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.reference import decoupled_plan as naive
from vllm_specrollout.cluster.ladder import Attach, Copy, GroupEngine, GroupPrices, Run, Worker, assign, decide, lend

METHODS = ("small", "large", "ngram")


def engine(running: dict[str, Copy] | None = None, *, places: int = 4, **more: Any) -> GroupEngine:
    return GroupEngine(version=1, places=places, running=running or {}, host="here", **more)


def decided(engines: dict[str, GroupEngine], prices: GroupPrices | None = None, *, moves: bool = True) -> list[Run]:
    """Of what runs."""
    return decide([], engines, 1, {}, prices or GroupPrices(), {}, moves=moves)


def long(tokens: int = 400, steps: int = 400) -> Copy:
    return Copy(prompt=10, tokens=tokens, gained=tokens, steps=steps)


def measured(*, fill_s: float) -> GroupPrices:
    """A step takes 10 ms, and 2 ms more for each request."""
    prices = GroupPrices()
    for batch in (1, 8):
        prices.stepped(batch, 0.01 + 0.002 * batch)
    prices.filled(1, fill_s)
    return prices


def test_an_engine_with_other_weights_or_none_gets_nothing() -> None:
    old, down = engine(), engine()
    old.version, down.version = 0, None
    assert decide([("x", "x")], {"a": old, "b": down}, 1, {}, GroupPrices(), {}, moves=True) == []


def test_half_of_the_fullest_ones_requests_move_where_smaller_batches_repay_the_prefill() -> None:
    running = {f"r{i}": long(400 + i) for i in range(4)}
    engines = {"a": engine(running), "b": engine()}
    moves = [Run("b", "r0", "a"), Run("b", "r1", "a")]
    assert decided(engines, measured(fill_s=1e-4)) == moves, "the shortest contexts"
    assert decided(engines, measured(fill_s=1e-1)) == [], "a prefill costs more than it brings"
    assert decided(engines) == [], "nothing was measured"
    assert decided(engines, measured(fill_s=1e-4), moves=False) == []


def test_what_cannot_be_resumed_is_never_moved() -> None:
    running = {f"r{i}": Copy(10, 400 + i, 400, 400, may_move=i == 3) for i in range(4)}
    found = decided({"a": engine(running), "b": engine()}, measured(fill_s=1e-4))
    assert found == [Run("b", "r3", "a")]


def test_an_idle_engines_drafter_is_lent_to_stragglers_of_its_host_and_taken_back() -> None:
    slow = {"slow": long()}
    lender = engine(drafter="ipc:///d", method="small")
    assert lend({"a": engine(slow), "b": lender}, 4) == [Attach("a", "b", ("slow",))]
    elsewhere = engine(drafter="ipc:///d", method="small")
    elsewhere.host = "there"
    assert lend({"a": engine(slow), "b": elsewhere}, 4) == []
    helped = engine(slow, lent={"b": ("slow",)})
    assert lend({"a": helped, "b": lender}, 4) == [], "it is so already"
    busy = engine({"own": long()}, drafter="ipc:///d", method="small")
    assert lend({"a": helped, "b": busy}, 4) == [Attach("a", "b")]


def test_one_drafter_is_lent_to_several_engines_and_to_no_more_than_its_share_of_requests() -> None:
    engines = {
        "a": engine({f"a{i}": long(400, 400 - i) for i in range(3)}),
        "b": engine({f"b{i}": long(400, 300 - i) for i in range(3)}),
        "c": engine(drafter="ipc:///d", method="small"),
    }
    found = lend(engines, 4)
    assert found == [Attach("a", "c", ("a0", "a1", "a2")), Attach("b", "c", ("b0",))]
    engines["a"].lent, engines["b"].lent = {"c": ("a0", "a1", "a2")}, {"c": ("b0",)}
    del engines["a"].running["a1"]
    assert lend(engines, 4) == [Attach("b", "c", ("b0", "b1"))], "its place goes to the next one"


def test_prices_lie_on_the_line_between_what_was_measured_and_nowhere_else() -> None:
    prices = measured(fill_s=0.5)
    assert prices.step_s(1) == 0.012 and abs((prices.step_s(4) or 0.0) - 0.018) < 1e-12
    assert prices.step_s(9) is None and prices.step_s(0) is None
    assert prices.prefill_s(3) == 1.5 and GroupPrices().prefill_s(3) is None
    prices.stepped(1, 0.112)
    assert abs((prices.step_s(1) or 0.0) - 0.022) < 1e-12, "the newest has a tenth"


def test_problems_with_long_answers_come_first_and_each_goes_where_the_least_is_left() -> None:
    engines = {"a": engine({"r": Copy(1, 1, left=250.0)}), "b": engine()}
    waiting = [(problem + "0", problem) for problem in "xyz"]
    forecasts = {"x": 100.0, "y": 300.0, "z": 200.0}
    found = decide(waiting, engines, 1, {}, GroupPrices(), forecasts, moves=False)
    assert found == [Run("b", "y0"), Run("a", "z0"), Run("b", "x0")]


def test_what_is_left_is_what_a_move_gains_where_lengths_are_known() -> None:
    prices = measured(fill_s=1e-4)
    for left, moves in ((1000.0, 1), (1.0, 0)):
        running = {f"r{i}": Copy(10, 400, 400, 400, left) for i in range(2)}
        found = decided({"a": engine(running), "b": engine()}, prices)
        assert len(found) == moves


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
