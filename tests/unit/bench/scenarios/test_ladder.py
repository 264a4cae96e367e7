"""What a ladder is asked, and what its rows tell."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest

from bench.runner.rows import Pair, Run
from bench.scenarios.ladder import AUTO, Ladder
from vllm_specrollout.errors import ConfigError


def test_workers_that_would_share_a_core_are_refused() -> None:
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(ConfigError) as error:
        Ladder(workers=cores + 2).check()
    assert error.value.cause == f"`--workers` is {cores + 2}, and this host has {cores} cores" and error.value.hint


def test_samples_of_the_longest_problem_come_first_and_are_asked_together() -> None:
    found = Ladder(requests=7, samples=3)._problems(0)
    assert [one.problem_id for one in found[:3]] == [found[0].problem_id] * 3 and len(found) == 7
    assert found[0].size == max(one.size for one in found) and len({one.problem_id for one in found}) == 3


def test_auto_stands_beside_the_best_of_the_others_round_by_round_and_nothing_where_outputs_differ(
    make_run: Callable[..., Run],
) -> None:
    def paired(token: int, *seconds: float) -> list[Pair]:
        return [Pair(stock=make_run([[7]], [9.0]), ours=make_run([[token]], [one])) for one in seconds]

    pairs = {"off": paired(7, 10.0, 20.0, 30.0), "move": paired(7, 8.0, 18.0, 26.0), AUTO: paired(7, 8.0, 20.0, 25.0)}
    scenario = Ladder(ladders=("off", "move", AUTO))
    row = scenario._row(AUTO, "move", pairs, "move", Counter(moved=3))
    assert (row.makespan_s, row.speedup, row.of_best, row.moved) == (20.0, 1.2, 1.0, 3)
    other = scenario._row(AUTO, "move", {**pairs, AUTO: paired(8, 8.0, 20.0, 25.0)}, "move", Counter(moved=3))
    assert other.difference is not None and "stock 7, ours 8" in other.difference
    assert other.makespan_s is None and other.speedup is None and other.of_best is None
