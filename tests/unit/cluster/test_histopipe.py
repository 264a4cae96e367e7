"""Which engine gets which problem, by the lengths of earlier answers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_specrollout.cluster.histopipe import (
    Room,
    deal,
    growth,
    homes_of_step,
    outliers,
    pipeline,
    ranks,
    workers_of_ranks,
)
from vllm_specrollout.cluster.ladder import Copy, Prices, _pays

TWO = {"a": Room(4), "b": Room(4)}


def siblings(**counts: int) -> list[tuple[str, str]]:
    return [(f"{problem}{i}", problem) for problem, count in counts.items() for i in range(count)]


def test_the_longest_problem_goes_first_and_the_next_ones_to_who_has_least() -> None:
    found = deal(siblings(short=1, long=1, middle=1), TWO, {"short": 10, "middle": 100, "long": 150})
    assert found == {"long0": "a", "middle0": "b", "short0": "b"}


def test_siblings_stay_together_where_an_engine_has_places_for_all() -> None:
    rooms = {"small": Room(1), "large": Room(3, tokens=50.0)}
    assert set(deal(siblings(x=3), rooms, {}).values()) == {"large"}


def test_siblings_of_a_full_home_wait_unless_an_engine_has_nothing_to_do() -> None:
    rooms = {"home": Room(0, 90.0), "busy": Room(4, 1.0)}
    assert deal(siblings(x=2), rooms, {}, {"x": "home"}) == {}
    assert deal(siblings(x=2), rooms | {"idle": Room(4)}, {}, {"x": "home"}) == {"x0": "idle", "x1": "idle"}
    assert deal(siblings(x=2), rooms, {}, {"x": "one that is gone"}) == {"x0": "busy", "x1": "busy"}


def test_a_problem_without_a_past_counts_as_the_median_one() -> None:
    found = deal(siblings(new=1, x=1, y=1, z=1), {"a": Room(9), "b": Room(9)}, {"x": 90, "y": 50, "z": 40})
    assert found == {"x0": "a", "new0": "b", "y0": "b", "z0": "a"}


def naive_deal(waiting, rooms, forecasts, homes):
    """One look at all engines for each part of a problem."""
    known = sorted(forecasts.values())
    usual = (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2 if known else 1.0
    places, tokens = {n: r.places for n, r in rooms.items()}, {n: r.tokens for n, r in rooms.items()}
    out = {}
    for problem in sorted(dict.fromkeys(p for _, p in waiting), key=lambda p: -forecasts.get(p, usual)):
        home = homes.get(problem)
        left = [request for request, own in waiting if own == problem]
        while left:
            free = [name for name in rooms if places[name]]
            if home in rooms and not places[home]:
                free = [name for name in free if not tokens[name]]
            elif home in rooms:
                free = [home]
            free = [name for name in free if places[name] >= len(left)] if home not in rooms else free
            if not free and home not in rooms:
                free = [name for name in rooms if places[name]]
            if not free:
                break
            home = min(free, key=lambda name: tokens[name])
            request = left.pop(0)
            out[request] = home
            places[home] -= 1
            tokens[home] += forecasts.get(problem, usual)
    return out


names = st.sampled_from("vwxyz")


@given(
    counts=st.dictionaries(names, st.integers(1, 5)),
    rooms=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.0, 3.0, 40.0])), max_size=5),
    forecasts=st.dictionaries(names, st.integers(1, 60).map(float)),
    homes=st.dictionaries(names, st.sampled_from(["e0", "e1", "gone"])),
)
def test_it_deals_as_a_look_at_all_engines_would(counts, rooms, forecasts, homes) -> None:
    waiting, given_rooms = siblings(**counts), {f"e{i}": Room(*room) for i, room in enumerate(rooms)}
    assert deal(waiting, given_rooms, forecasts, homes) == naive_deal(waiting, given_rooms, forecasts, homes)


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
    copies = {"long": Copy(prompt=10, tokens=500, gained=500, steps=500), "short": Copy(10, 100, 100, 100)}
    running = {request: copy.tokens for request, copy in copies.items()}

    def chosen(fill_s: float, *, dealt: int = 20, longest: float = 400.0) -> list[str]:
        prices = Prices()
        for batch in (1, 4):
            prices.stepped(batch, 0.01 + 0.002 * batch)
        prices.filled(1, fill_s)
        return outliers(running, dealt, longest, 1.1, lambda moved: _pays(copies, moved, prices))

    assert chosen(1e-5) == ["long"]
    assert chosen(1.0) == [], "a prefill costs more than it brings"
    assert chosen(1e-5, dealt=19) == [], "more than a tenth of them run"
    assert chosen(1e-5, longest=500.0) == [], "it was as long before"


def test_a_step_has_half_as_many_ranks_as_engines_where_steps_are_measured_and_else_one_for_each() -> None:
    forecasts = {f"p{i}": (10.0 if i < 4 else 1000.0) + i for i in range(8)}
    requests, engines = dict.fromkeys(forecasts, 4), ["a", "b", "c", "d"]
    plain = homes_of_step(forecasts, requests, engines, 1, lambda batch: None)
    assert [plain[f"p{i}"] for i in range(8)] == ["a", "a", "b", "b", "c", "c", "d", "d"]
    tiered = homes_of_step(forecasts, requests, engines, 1, lambda batch: 0.01 + 0.001 * batch)
    assert [tiered[f"p{i}"] for i in range(4)] == ["a"] * 4, "the short rank needs one engine"
    assert {tiered[f"p{i}"] for i in range(4, 8)} == {"b", "c", "d"}
    assert {homes_of_step(forecasts, requests, engines, 2, lambda batch: None)["p0"]} == {"d"}
