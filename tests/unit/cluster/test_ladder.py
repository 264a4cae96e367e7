"""What a group decides, case by case; test_driver.py has it under random schedules."""

from __future__ import annotations

from typing import Any

from vllm_specrollout.cluster.ladder import Attach, Command, Copy, Engine, Move, Prices, Rules, Run, decide


def engine(running: dict[str, Copy] | None = None, *, places: int = 4, **more: Any) -> Engine:
    return Engine(version=1, places=places, running=running or {}, host="here", **more)


def decided(
    engines: dict[str, Engine],
    waiting: list[tuple[str, str]] | None = None,
    *,
    ladder: str = "off",
    homes: dict[str, str] | None = None,
    prices: Prices | None = None,
) -> list[Command]:
    return decide(waiting or [], engines, 1, homes or {}, Rules(ladder), prices or Prices())


def long(tokens: int = 400, steps: int = 400) -> Copy:
    return Copy(prompt=10, tokens=tokens, gained=tokens, steps=steps)


def measured(*, fill_s: float) -> Prices:
    """A step takes 10 ms, and 2 ms more for each request."""
    prices = Prices()
    for batch in (1, 8):
        prices.stepped(batch, 0.01 + 0.002 * batch)
    prices.filled(1, fill_s)
    return prices


def test_siblings_go_to_one_engine_and_problems_to_the_emptiest() -> None:
    engines = {"a": engine(), "b": engine()}
    waiting = [(f"{problem}{i}", problem) for problem in "xy" for i in range(2)]
    assert decided(engines, waiting) == [Run("a", "x0"), Run("a", "x1"), Run("b", "y0"), Run("b", "y1")]


def test_siblings_of_a_full_engine_wait_unless_another_one_has_nothing_to_do() -> None:
    full = engine({f"r{i}": Copy(1, 1) for i in range(4)})
    busy = {"a": full, "b": engine({"q": Copy(1, 1)})}
    assert decided(busy, [("x0", "x")], homes={"x": "a"}) == []
    assert decided({"a": full, "b": engine()}, [("x0", "x")], homes={"x": "a"}) == [Run("b", "x0")]


def test_an_engine_with_other_weights_or_none_gets_nothing() -> None:
    old, down = engine(), engine()
    old.version, down.version = 0, None
    assert decided({"a": old, "b": down}, [("x", "x")]) == []


def test_half_of_the_fullest_ones_requests_move_where_smaller_batches_repay_the_prefill() -> None:
    running = {f"r{i}": long(400 + i) for i in range(4)}
    engines = {"a": engine(running), "b": engine()}
    moves = [Move("b", "r0", "a"), Move("b", "r1", "a")]
    assert decided(engines, ladder="move", prices=measured(fill_s=1e-4)) == moves, "the shortest contexts"
    assert decided(engines, ladder="move", prices=measured(fill_s=1e-1)) == [], "a prefill costs more than it brings"
    assert decided(engines, ladder="move") == [], "nothing was measured"
    assert decided(engines, prices=measured(fill_s=1e-4)) == []


def test_what_cannot_be_resumed_is_never_moved() -> None:
    running = {f"r{i}": Copy(10, 400 + i, 400, 400, may_move=i == 3) for i in range(4)}
    found = decided({"a": engine(running), "b": engine()}, ladder="move", prices=measured(fill_s=1e-4))
    assert found == [Move("b", "r3", "a")]


def test_an_idle_engines_drafter_is_lent_to_stragglers_of_its_host_and_taken_back() -> None:
    slow = {"slow": long()}
    lender = engine(drafter="ipc:///d", method="small")
    assert decided({"a": engine(slow), "b": lender}, ladder="attach") == [Attach("a", "b", ("slow",))]
    elsewhere = engine(drafter="ipc:///d", method="small")
    elsewhere.host = "there"
    assert decided({"a": engine(slow), "b": elsewhere}, ladder="attach") == []
    lent = engine(slow, lent={"b": ("slow",)})
    assert decided({"a": lent, "b": lender}, ladder="attach") == [], "it is so already"
    busy = engine({"own": long()}, drafter="ipc:///d", method="small")
    assert decided({"a": lent, "b": busy}, ladder="attach") == [Attach("a", "b")]


def test_one_drafter_is_lent_to_several_engines_and_to_no_more_than_its_share_of_requests() -> None:
    engines = {
        "a": engine({f"a{i}": long(400, 400 - i) for i in range(3)}),
        "b": engine({f"b{i}": long(400, 300 - i) for i in range(3)}),
        "c": engine(drafter="ipc:///d", method="small"),
    }
    found = decided(engines, ladder="attach")
    assert found == [Attach("a", "c", ("a0", "a1", "a2")), Attach("b", "c", ("b0",))]
    engines["a"].lent, engines["b"].lent = {"c": ("a0", "a1", "a2")}, {"c": ("b0",)}
    del engines["a"].running["a1"]
    assert decided(engines, ladder="attach") == [Attach("b", "c", ("b0", "b1"))], "its place goes to the next one"


def test_prices_lie_on_the_line_between_what_was_measured_and_nowhere_else() -> None:
    prices = measured(fill_s=0.5)
    assert prices.step_s(1) == 0.012 and abs((prices.step_s(4) or 0.0) - 0.018) < 1e-12
    assert prices.step_s(9) is None and prices.step_s(0) is None
    assert prices.prefill_s(3) == 1.5 and Prices().prefill_s(3) is None
    prices.stepped(1, 0.112)
    assert abs((prices.step_s(1) or 0.0) - 0.022) < 1e-12, "the newest has a tenth"


def test_problems_with_long_answers_come_first_and_each_goes_where_the_least_is_left() -> None:
    engines = {"a": engine({"r": Copy(1, 1, left=250.0)}), "b": engine()}
    waiting = [(problem + "0", problem) for problem in "xyz"]
    forecasts = {"x": 100.0, "y": 300.0, "z": 200.0}
    found = decide(waiting, engines, 1, {}, Rules(), Prices(), forecasts)
    assert found == [Run("b", "y0"), Run("a", "z0"), Run("b", "x0")]


def test_what_is_left_is_what_a_move_gains_where_lengths_are_known() -> None:
    prices = measured(fill_s=1e-4)
    for left, moves in ((1000.0, 1), (1.0, 0)):
        running = {f"r{i}": Copy(10, 400, 400, 400, left) for i in range(2)}
        found = decided({"a": engine(running), "b": engine()}, ladder="move", prices=prices)
        assert len(found) == moves
