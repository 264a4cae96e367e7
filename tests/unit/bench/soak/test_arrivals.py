"""The plan of who arrives: it follows from its seed, and holds the shares that were asked for."""

import itertools
import statistics

import pytest

from bench.soak.arrivals import CHOICES, GRAMMAR, GRAMMARS, MOST_CHOICES, Mix, arrivals

SOME = 2000


def first(count, seed=3, per_second=4.0, **mix):
    return list(itertools.islice(arrivals(seed, per_second, Mix(**mix)), count))


def test_one_seed_is_one_plan_and_a_longer_run_begins_like_a_shorter_one():
    assert first(200)[:50] == first(50)
    assert first(50, seed=4) != first(50)


def test_they_come_at_random_at_the_rate_asked_for():
    times = [one.at_s for one in first(SOME)]
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert min(gaps) > 0.0
    # of a Poisson process mean and deviation are the same
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)


def test_each_share_is_as_asked_for():
    plan = first(SOME, recurring=0.3, grammar=0.2, choices=0.25, leaving=0.15, checked=0.5)
    shares = {
        "recurring": [one.is_recurring for one in plan],
        "grammar": [one.kind == GRAMMAR for one in plan],
        "choices": [one.kind == CHOICES for one in plan],
        "leaving": [one.leaves_after is not None for one in plan],
        "checked": [one.is_checked for one in plan if one.leaves_after is None],
    }
    found = {name: sum(flags) / len(flags) for name, flags in shares.items()}
    wanted = {"recurring": 0.3, "grammar": 0.2, "choices": 0.25, "leaving": 0.15, "checked": 0.5}
    assert found == pytest.approx(wanted, abs=0.05)


def test_one_share_moves_no_other_request():
    few, many = first(300, leaving=0.0), first(300, leaving=1.0)
    assert [(a.at_s, a.kind, a.problem) for a in few] == [(b.at_s, b.kind, b.problem) for b in many]


def test_problems_come_back_or_are_asked_once():
    plan = first(SOME, pool=8)
    back = {one.problem.problem_id for one in plan if one.is_recurring}
    once = [one.problem.problem_id for one in plan if not one.is_recurring]
    assert len(back) == 8 and len(set(once)) == len(once) and not back & set(once)


def test_no_two_answers_share_their_noise():
    seeds = [one.seed + i for one in first(SOME) for i in range(one.num_answers)]
    assert len(set(seeds)) == len(seeds)


def test_what_is_asked_for_fits_its_kind():
    for one in first(500):
        assert (one.kind == CHOICES) == (one.num_answers > 1) and one.num_answers <= MOST_CHOICES
        assert (one.kind == GRAMMAR) == (0 <= one.grammar < len(GRAMMARS))
        assert not one.is_checked or one.leaves_after is None
