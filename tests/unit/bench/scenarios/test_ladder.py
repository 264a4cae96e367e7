"""Who worked on what, as the workers told it."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_specrollout.bench.runner.plots import plot_workers
from vllm_specrollout.bench.scenarios.ladder import AUTO, Bar, Ladder, TimedGroup

from vllm_specrollout.cluster.reports import Part, Report
from vllm_specrollout.errors import ConfigError


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    """A request's, at an engine that is lent a drafter for a while; a second request has it not."""
    group = object.__new__(TimedGroup)
    group.bars, group._newest, group.own = [], {}, "ngram"
    lent = {"engine-1": ("r.1",)}
    for now, links in enumerate(({}, {}, lent, lent, {})):
        group._lending = SimpleNamespace(borrowed=lambda engine, links=links: links)  # type: ignore[assignment]
        monkeypatch.setattr("time.perf_counter", lambda now=now: float(now))
        group.note("engine-0", Report({"r.1": Part((7,), (), 1), "s.1": Part((7, 8), (), 1)}))
    return group.bars


def test_a_bar_ends_where_somebody_else_drafts(bars: list[Bar]) -> None:
    own = [(bar.drafter, bar.begin_s, bar.end_s, bar.tokens) for bar in bars if bar.request == "r"]
    assert own == [("ngram", 0.0, 1.0, 2), ("ngram and lent by engine-1", 1.0, 3.0, 2), ("ngram", 3.0, 4.0, 1)]
    assert [(bar.end_s, bar.tokens) for bar in bars if bar.request == "s"] == [(4.0, 10)]


def test_the_picture_of_the_workers_is_drawn(bars: list[Bar], tmp_path: Path) -> None:
    plot_workers({"off": bars[:1], "attach": bars}, "who worked on what", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_workers_that_would_share_a_core_are_refused() -> None:
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(ConfigError) as error:
        Ladder(workers=cores + 2).check()
    assert error.value.cause == f"`--workers` is {cores + 2}, and this host has {cores} cores" and error.value.hint


def test_samples_of_the_longest_problem_come_first_and_are_asked_together() -> None:
    found = Ladder(requests=7, samples=3)._problems(1)
    assert [one.problem_id for one in found[:3]] == [found[0].problem_id] * 3 and len(found) == 7
    assert found[0].size == max(one.size for one in found) and len({one.problem_id for one in found}) == 3


def test_auto_stands_beside_the_best_of_the_others_round_by_round_and_nothing_where_outputs_differ() -> None:
    seconds = {"off": [10.0, 20.0, 30.0], "move": [8.0, 18.0, 26.0], AUTO: [8.0, 20.0, 25.0]}
    scenario = Ladder(ladders=("off", "move", AUTO))
    row = scenario._row(AUTO, "move", seconds, "move", Counter(moved=3), None)
    assert (row.makespan_s, row.speedup, row.of_best, row.moved) == (20.0, 1.2, 1.0, 3)
    other = scenario._row(AUTO, "move", seconds, "move", Counter(moved=3), "request 0 differs")
    assert other.makespan_s is None and other.speedup is None and other.of_best is None
