"""Who worked on what, as the workers told it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_specrollout.bench.runner.plots import plot_workers
from vllm_specrollout.bench.scenarios.ladder import Bar, TimedGroup

from vllm_specrollout.cluster.reports import Part, Report


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
