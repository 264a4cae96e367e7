"""What bounds are measured with: requests asked once, the worst bodies, a loop that ticks; and the verdicts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from bench.bounds import posts
from bench.bounds.bodies import KINDS, VALID, body
from bench.bounds.checks import of_posts, of_problems
from bench.bounds.ids import growth_of_ids
from bench.bounds.memory import forget_peak, peak_mib, rss_mib
from bench.bounds.posts import Posted, post_each
from bench.bounds.problems import Held, ask_each_once
from bench.scenarios import bounds
from vllm_specrollout.reports import MAX_REWARDS


def held(**changes: float) -> Held:
    values = {"problems": 10, "rss_mib": 50.0, "answers": 10, "evicted": 0, "indices": 10, "index_mib": 0.5}
    return Held(**{**values, "disk_mib": 1.0, **changes})  # type: ignore[arg-type]


def posted(**changes: object) -> Posted:
    values = {
        "kind": VALID,
        "num_bytes": 100,
        "status": 200,
        "blocked_ms": (1.0, 60.0, 3.0),
        "took_ms": (1.0, 2.0, 3.0),
    }
    return Posted(**{**values, "peak_mib": 2.0, **changes})  # type: ignore[arg-type]


def verdicts(rows: list[object]) -> dict[str, bool | None]:
    return {row.name: row.passed for row in rows}  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["", "kept"])
def test_problems_that_are_asked_once_are_counted_on_their_way(tmp_path: Path, where: str) -> None:
    folder = str(tmp_path / where) if where else ""
    found = ask_each_once(folder, max_mib=1, max_disk_mib=1, sampled=[20, 900])
    assert [one.problems for one in found] == [20, 900] and [one.answers for one in found][0] == 20
    # 768 of them, and then some go at once
    assert 700 <= found[1].answers <= 768 and found[1].evicted == 900 - found[1].answers
    assert 0 < found[1].indices <= 129 and found[1].rss_mib > 10.0
    assert (found[1].disk_mib > 0.0) == bool(where)


def test_requests_with_long_ids_are_asked_and_over() -> None:
    pytest.importorskip("vllm")
    assert growth_of_ids(count=40, num_bytes=1 << 20) < 20.0


@pytest.mark.parametrize("kind", KINDS)
def test_bodies_fill_what_a_server_takes_and_no_more(kind: str) -> None:
    small, large = body(kind, 1 << 16), body(kind, 1 << 24)
    assert (1 << 16) - 300 < len(small) <= 1 << 16 < len(large) <= 1 << 24
    assert len(json.loads(small)["rewards"]) <= len(json.loads(large)["rewards"]) <= MAX_REWARDS


@pytest.mark.parametrize(("kind", "status"), [(VALID, 200), ("empty rewards", 422), ("", 0)])
def test_bodies_are_posted_to_the_routes_of_a_server(monkeypatch: pytest.MonkeyPatch, kind: str, status: int) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(posts, "_QUIET_S", 0.001)
    monkeypatch.setattr(posts.gc, "freeze", lambda: None)
    monkeypatch.setenv(posts.LIMIT, "1")
    found = post_each(kind, 1 << 12, limit_mib=1, times=3)
    assert found.status == status and len(found.blocked_ms) == len(found.took_ms) == 3
    assert found.num_bytes <= 1 << 12 and found.peak_mib >= 0.0


def test_a_loop_that_stands_still_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(posts, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    async def stand_still() -> float:
        ticks = posts._Ticks()
        for now in (0.001, 0.002, 0.052, 0.053):
            await asyncio.sleep(0.002)
            clock[0] = now
        return await ticks.end()

    # beyond what it slept
    assert asyncio.run(stand_still()) == pytest.approx(49.0)


def test_a_peak_is_never_below_what_is_held_now() -> None:
    forget_peak()
    block = bytearray(1 << 25)
    assert peak_mib() >= rss_mib() - 1.0 and len(block) == 1 << 25


def test_memory_and_disk_that_grow_beyond_their_limits_do_not_hold() -> None:
    names = ["growth after 10 problems", "answers known", "indices", "disk"]
    rows = of_problems("x", [held(), held(problems=90, rss_mib=54.0, answers=768)], 1, 5.0, 2)
    assert [verdicts(rows)[name] for name in names] == [True] * 4
    last = held(problems=90, rss_mib=56.0, answers=769, index_mib=1.5, disk_mib=3.0)
    assert [verdicts(of_problems("x", [held(), last], 1, 5.0, 2))[name] for name in names] == [False] * 4


def test_where_growth_is_not_judged_what_an_answer_takes_is_told() -> None:
    last = held(rss_mib=50.0 + 1.5, index_mib=1.0, answers=10 + 1024)
    rows = {row.name: row for row in of_problems("x", [held(), last], 1024, None, None)}
    assert rows["an answer and its index"].value == pytest.approx(1536.0)
    assert rows["growth after 10 problems"].passed is None and "disk" not in rows


def test_the_usual_standstill_counts_and_not_the_hosts_worst_moment() -> None:
    assert verdicts(of_posts(posted(), 50.0, 30.0))["event loop stands still"]
    worse = verdicts(of_posts(posted(blocked_ms=(70.0, 60.0, 3.0), peak_mib=31.0), 50.0, 30.0))
    assert (worse["event loop stands still"], worse["memory"], worse["answered after"]) == (False, False, None)
    assert [row.passed for row in of_posts(posted(kind=""), 0.0, 0.0)] == [None]


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_command_judges_all_parts_and_fails_where_one_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    asked: list[tuple[object, ...]] = []

    def alone(function: object, *arguments: object) -> object:
        asked.append(arguments)
        if function is ask_each_once:
            return [held(), held(problems=90)]
        if function is growth_of_ids:
            return 5.1 if is_slow else 4.9
        return posted(kind=arguments[0], blocked_ms=(99.0,) if is_slow else (1.0,))

    monkeypatch.setattr(bounds, "_alone", alone)
    app, report = typer.Typer(), tmp_path / "report.json"
    app.command()(bounds.bench_bounds)
    result = CliRunner().invoke(app, ["--json", str(report)])
    rows = json.loads(report.read_text())["rows"]
    assert result.exit_code == int(is_slow), result.output
    assert len({row["what"] for row in rows}) == len(asked) == 4 + 1 + len(KINDS) + 1
    assert all(row["passed"] is not False for row in rows) != is_slow
    assert [row["limit"] for row in rows if row["name"] == "event loop stands still"] == [None, *[50.0] * 4]
    assert CliRunner().invoke(app, ["--settled", "9", "--problems", "9"]).exit_code != 0
