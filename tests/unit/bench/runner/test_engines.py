"""Who runs when in a round, and what is remembered of stock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.runner import engines as module
from bench.runner.engines import IN_ONE_PROCESS, STOCK, Engines, interleaved, run_round, sampling
from tests.unit.bench.runner.fake_engines import FakeProcess


@given(st.integers(-1, 9), st.integers(1, 6))
def test_every_round_runs_stock_once_and_every_arm_once(number, count):
    order = interleaved(number, list(range(count)))
    assert order.count(None) == 1
    assert sorted(arm for arm in order if arm is not None) == list(range(count))


def test_of_one_arm_and_stock_each_goes_first_in_every_other_round():
    assert [interleaved(number, ["ours"]) for number in (-1, 0, 1)] == [
        ["ours", None],
        [None, "ours"],
        ["ours", None],
    ]


def test_arms_are_paired_with_stocks_run_of_the_same_round_and_may_be_left_out():
    pairs = run_round(-1, ["a", "b"], lambda arm: None if arm == "b" else f"run of {arm}")
    assert list(pairs) == ["a"]
    assert (pairs["a"].stock, pairs["a"].ours, pairs["a"].is_timed) == ("run of None", "run of a", False)


def test_requests_of_stock_and_ours_differ_in_nothing_but_our_options():
    ours = sampling(3, 8, {"problem_id": "a"}, is_to_the_end=True)
    assert ours.pop("extra_args") == {"spec_rollout": {"problem_id": "a"}}
    assert ours == sampling(3, 8, is_to_the_end=True)


@pytest.fixture
def unsteady(monkeypatch):
    """Engines whose stock answers something else every time."""
    monkeypatch.setattr(module, "EngineProcess", type("Fake", (FakeProcess,), {"is_stock_unsteady": True}))
    with Engines({}, lambda *_: None, kv_gib=1, is_verbose=False, environment=IN_ONE_PROCESS) as engines:
        engines.start(STOCK)
        yield engines


def test_stock_is_compared_with_its_first_answers_to_the_same_requests(unsteady):
    first, again = (unsteady.run(STOCK, [[5]], [sampling(0, 2)]) for _ in range(2))
    assert first.itself is None
    wanted, then = (run.token_ids[0][1] for run in (first, again))
    assert again.itself.as_text("then") == f"request 0, token 1: stock {wanted}, then {then}" and wanted != then
    assert unsteady.run(STOCK, [[6]], [sampling(0, 2)]).itself is None


def test_a_recording_is_stocks_second_run(unsteady):
    assert unsteady.record([[5]], [sampling(0, 2)]).itself is not None


def test_an_engine_that_is_stopped_makes_room_and_is_gone(unsteady):
    other = unsteady.start("other", {"drafters": ["ngram"]})
    unsteady.stop("other")
    assert other.is_closed
    with pytest.raises(KeyError):
        unsteady.ask("other", "generate")
    assert unsteady.run(STOCK, [[5]], [sampling(0, 2)]).itself is None


def test_the_plugin_is_loaded_where_there_is_a_configuration_or_where_told(unsteady):
    unsteady.start("ours", {"drafters": ["ngram"]}, speculative_config=None)
    unsteady.start("installed", None, has_plugin=True)
    specs = {name: unsteady[name].spec for name in (STOCK, "ours", "installed")}
    assert [spec.has_plugin for spec in specs.values()] == [False, True, True]
    assert specs["ours"].arguments == {"speculative_config": None}
