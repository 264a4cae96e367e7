"""`specrollout bench bounds`: what must not grow or stand still whatever is asked of a server. No engine runs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from rich.console import Console
from rich.table import Table

from vllm_specrollout.cli import flags as cli_flags
from vllm_specrollout.config.drafters import HistoryConfig

from ..bounds.bodies import KINDS
from ..bounds.checks import Row, judged, of_posts, of_problems
from ..bounds.ids import growth_of_ids
from ..bounds.posts import post_each
from ..bounds.problems import ask_each_once
from ..runner.report import Found, host
from ..runner.scenario import Scenario, Session, command, flag

PROBLEMS, POSTS, IDS = "problems", "posts", "ids"
PARTS = (PROBLEMS, POSTS, IDS)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Bounds(Scenario):
    """Memory and disk where no problem ever comes back, and with long ids; an event loop under the worst bodies."""

    bench: ClassVar[str] = "bounds"

    parts: tuple[str, ...] = flag(PARTS, "What to measure.", "--what", choices=PARTS)
    problems: int = flag(100_000, "Problems, each asked once.", within=(2, 100_000_000))
    settled: int = flag(20_000, "Problems after which memory may grow no more.", within=(1, 100_000_000))
    max_mib: int = flag(
        16, "`history.max_mib` where growth is judged; with the default it is told.", within=(1, 1 << 20)
    )
    max_disk_mib: int = flag(16, "`history.max_disk_mib` there.", within=(1, 1 << 30))
    growth_mib: float = flag(5.0, "MiB by which memory may grow from then on.", within=(0, 1 << 20))
    body_mib: int = flag(8, "MiB of a body that the server takes, and that bodies have at most.", within=(1, 1024))
    times: int = flag(
        5, "Times that a body is posted; of the longest standstills, the median counts.", within=(1, 1000)
    )
    blocked_ms: float = flag(50.0, "Milliseconds for which the event loop may stand still.", within=(0, 1 << 20))
    peak_mib: float = flag(30.0, "MiB that a body may take.", within=(0, 1 << 20))

    ids: int = flag(500, "Requests with ids of 1 MiB, one after the other.", within=(1, 1_000_000))

    def check(self) -> None:
        super().check()
        cli_flags.in_range(self.settled, "--settled", 1, self.problems - 1)

    def measure(self, session: Session) -> Found:
        parts = {PROBLEMS: 4, POSTS: 1 + len(KINDS), IDS: 1}
        report = session.display.steps(sum(parts[part] for part in self.parts))
        rows: list[Row] = []
        if PROBLEMS in self.parts:
            for max_mib in (self.max_mib, 0):
                for folder in ("", str(session.scratch / f"history-{max_mib}")):
                    report(f"{self.problems:,} problems", 0)
                    rows += self._problems(folder, max_mib)
                    report("", 1)
        if POSTS in self.parts:
            for kind in ("", *KINDS):
                report(kind, 0)
                posted = _alone(post_each, kind, self.body_mib << 20, self.body_mib, self.times)
                rows += of_posts(posted, self.blocked_ms, self.peak_mib)
                report("", 1)
        if IDS in self.parts:
            report(IDS, 0)
            growth = _alone(growth_of_ids, self.ids, 1 << 20)
            rows.append(judged("ids of 1 MiB", f"growth with {self.ids:,} requests", "MiB", growth, self.growth_mib))
            report("", 1)
        return Found(rows=rows)

    def _problems(self, folder: str, max_mib: int) -> list[Row]:
        max_disk_mib = self.max_disk_mib if max_mib else HistoryConfig().max_disk_mib
        held = _alone(ask_each_once, folder, max_mib, max_disk_mib, [self.settled, self.problems])
        most = max_mib or HistoryConfig().max_mib
        what = f"one-off problems {'on disk' if folder else 'in memory'}, max_mib {most}"
        growth_mib, disk_mib = self.growth_mib if max_mib else None, max_disk_mib if folder else None
        return of_problems(what, held, most, growth_mib, disk_mib)

    def show(self, found: Found, out: Console) -> None:
        out.print(f"bounds, no engine; {host()['cpu']}", markup=False)
        table = Table("what", "measured", "value", "limit", "unit", "holds", pad_edge=False)
        for row in found.rows:
            limit = "-" if row.limit is None else f"{row.limit:g}"
            holds = {True: "yes", False: "NO", None: "-"}[row.passed]
            table.add_row(row.what, row.name, f"{row.value:.1f}", limit, row.unit, holds)
        out.print(table)


def _alone(function: Callable[..., T], *arguments: Any) -> T:
    """In a process made for it, whose memory is that of this alone."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        return processes.submit(function, *arguments).result()


bench_bounds = command(Bounds)
