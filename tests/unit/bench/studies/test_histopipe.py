"""Which engine gets which problem with two steps in flight, and who moves on."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm_specrollout.bench.studies.histopipe import growth, outliers, pipeline, ranks, workers_of_ranks


@given(forecasts=st.dictionaries(st.text(max_size=3), st.integers(0, 99)), count=st.integers(1, 6))
def test_ranks_hold_each_problem_once_in_order_and_are_alike_in_size(forecasts, count) -> None:
    found = ranks(forecasts, count)
    flat = [problem for rank in found for problem in rank]
    assert sorted(flat) == sorted(forecasts) and len(found) == count
    assert [forecasts[problem] for problem in flat] == sorted(forecasts.values())
    sizes = [len(rank) for rank in found]
    assert max(sizes) - min(sizes) <= 1


def test_an_engines_long_step_follows_a_short_one() -> None:
    groups, engines = [["p"], ["q"], ["r"]], ["a", "b", "c"]
    assert pipeline(groups, engines, 1) == {"p": "a", "q": "b", "r": "c"}
    assert pipeline(groups, engines, 2) == {"r": "a", "q": "b", "p": "c"}


def test_a_ranks_problems_go_round_its_own_engines() -> None:
    found = pipeline([["p", "q"], ["r", "s", "t"]], ["a", "b", "c"], 1, [1, 2])
    assert found == {"p": "a", "q": "a", "r": "b", "s": "c", "t": "b"}


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=4), step=st.integers(0, 5))
def test_every_engine_serves_one_rank_and_opposite_steps_mirror_each_other(counts, step) -> None:
    engines = [f"e{i}" for i in range(sum(counts))]
    groups = [[f"r{i}p{j}" for j in range(8)] for i in range(len(counts))]
    now, then = pipeline(groups, engines, step, counts), pipeline(groups, engines, step + 1, counts)
    for group, count in zip(groups, counts, strict=True):
        assert len({now[problem] for problem in group}) == count
    assert len(set(now.values())) == len(engines)
    mirror = dict(zip(engines, reversed(engines), strict=True))
    assert {problem: mirror[engine] for problem, engine in now.items()} == then


def batched(length: float, workers: int) -> float:
    """16 requests of a rank on so many workers: each step has a part per request."""
    return length * (1.0 + 0.2 * 16 / workers)


def test_long_ranks_get_workers_of_the_short_ones_and_all_workers_serve() -> None:
    plan = workers_of_ranks([1.0, 1.5, 2.5, 8.0], 12, batched)
    assert plan is not None and sum(plan) == 12 and plan == sorted(plan) and plan[3] > 3
    assert workers_of_ranks([1.0, 2.0], 1, batched) is None


def test_no_rank_need_be_faster_than_the_trainer() -> None:
    plan = workers_of_ranks([1.0, 1.0, 8.0], 9, batched, train_s=100.0)
    assert plan == [1, 1, 7], "what no rank needs helps the longest"


@given(lengths=st.lists(st.floats(0.5, 20.0), min_size=2, max_size=4).map(sorted), spare=st.integers(0, 5))
@example(lengths=[10.0, 15.0, 15.0, 15.0], spare=4)
def test_no_other_plan_has_a_lower_line(lengths, spare) -> None:
    workers = len(lengths) + spare

    def line(plan) -> float:
        """2 t0 + (N - 1) d of the least line above all times."""
        first = batched(lengths[0], plan[0])
        slope = max((batched(lengths[i], plan[i]) - first) / i for i in range(1, len(plan)))
        return 2.0 * first + (len(plan) - 1) * max(slope, 0.0)

    plans = [p for p in itertools.product(range(1, workers + 1), repeat=len(lengths)) if sum(p) == workers]
    found = workers_of_ranks(lengths, workers, batched, precision_s=1e-4)
    assert found is not None and line(found) <= min(map(line, plans)) * (1.0 + 1e-9) + 1e-3


def test_growth_is_the_third_quartile_and_never_below_a_tenth() -> None:
    before = dict.fromkeys("abcd", 10.0)
    assert growth(before, {"a": 10.0, "b": 12.0, "c": 14.0, "d": 20.0}) == pytest.approx(1.85)
    assert growth(before, dict.fromkeys("abcd", 9.0)) == growth({}, {"a": 5.0}) == 1.1


def test_the_last_tenth_migrates_where_it_outgrew_its_rank_and_the_prefill_pays() -> None:
    running = {"long": 500, "short": 100}

    def chosen(*, dealt: int = 20, longest: float = 400.0, pays: bool = True) -> list[str]:
        return outliers(running, dealt, longest, 1.1, lambda moved: pays)

    assert chosen() == ["long"]
    assert chosen(pays=False) == []
    assert chosen(dealt=19) == [], "more than a tenth of them run"
    assert chosen(longest=500.0) == [], "it was as long before"
