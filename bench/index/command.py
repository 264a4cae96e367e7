"""`specrollout bench index`: flags in, table and JSON out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_specrollout.config import MAX_NODES
from vllm_specrollout.drafter_config import HistoryConfig

from ..common import flags
from ..common.display import Display
from ..common.report import check_writable, make_report
from .data import RECORDED, recorded, synthetic
from .measure import Row, compare, flatness, many_problems
from .systems import ARCTIC, check_arctic

DATA = ("recorded", "synthetic")
_UNITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of one `specrollout bench index`."""

    data: tuple[str, ...] = DATA
    nodes: int = 32
    """Most nodes of a draft, in both."""
    batch: int = 64
    """Requests that ask at once."""
    problems: int = 2
    """Synthetic problems, with 16 answers in each of two epochs."""
    tokens: int = 16_384
    """Tokens of a synthetic answer."""
    drafted: int = 1024
    """Last tokens of each synthetic answer that are drafted."""
    seed: int = 0

    def __post_init__(self) -> None:
        flags.in_range(self.nodes, "--nodes", 1, MAX_NODES)
        flags.in_range(self.batch, "--batch", 1, 4096)
        flags.in_range(self.problems, "--problems", 1, 1000)
        flags.in_range(self.tokens, "--tokens", 64, 1 << 20)
        flags.in_range(self.drafted, "--drafted", 1, self.tokens)
        flags.in_range(self.seed, "--seed", 0, 1 << 30)


_DEFAULT = Plan()


def bench_index(
    data: Annotated[str, typer.Option(help="What to compare on.")] = ",".join(DATA),
    nodes: Annotated[int, typer.Option(help="Most nodes of a draft.")] = _DEFAULT.nodes,
    batch: Annotated[int, typer.Option(help="Requests that ask at once.")] = _DEFAULT.batch,
    problems: Annotated[int, typer.Option(help="Synthetic problems.")] = _DEFAULT.problems,
    tokens: Annotated[int, typer.Option(help="Tokens of a synthetic answer.")] = _DEFAULT.tokens,
    drafted: Annotated[int, typer.Option(help="Last tokens of it that are drafted.")] = _DEFAULT.drafted,
    min_match: Annotated[int, typer.Option(help="As `history.min_match`.")] = 1,
    max_match: Annotated[int, typer.Option(help="As `history.max_match`.")] = HistoryConfig().max_match,
    max_matches: Annotated[int, typer.Option(help="As `history.max_matches`.")] = HistoryConfig().max_matches,
    recorded_file: Annotated[
        Path, typer.Option("--recorded", help="Other recorded answers.", show_default=False)
    ] = RECORDED,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")] = None,
    seed: Annotated[int, typer.Option(help="Of the synthetic answers.")] = _DEFAULT.seed,
) -> None:
    """The history index beside arctic-inference's suffix cache: time, memory, accepted tokens."""
    plan = Plan(
        data=flags.names(data, "--data", DATA),
        nodes=nodes,
        batch=batch,
        problems=problems,
        tokens=tokens,
        drafted=drafted,
        seed=seed,
    )
    config = HistoryConfig(min_match=min_match, max_match=max_match, max_matches=max_matches)
    check_writable(json, "--json")
    check_arctic()
    rows: list[Row] = []
    with Display() as display:
        advance = display.steps(_UNITS * len(plan.data) + ("synthetic" in plan.data) * 2 + ("recorded" in plan.data))
        if "recorded" in plan.data:
            held = recorded(recorded_file)
            rows += compare(held, config, nodes, batch, 0, advance)
            rows += many_problems(held, config, 10_000, advance)
        if "synthetic" in plan.data:
            made = synthetic(problems, 16, tokens, 1, seed)
            rows += compare(made, config, nodes, batch, tokens - drafted, advance)
            rows.append(flatness(config, nodes, seed, (10_000, 1_000_000), advance))
    settings = {**asdict(plan), "arctic": ARCTIC, "config": asdict(config)}
    report = make_report("index", settings, rows)  # type: ignore[arg-type]
    display.out.print(
        f"history index beside arctic-inference {ARCTIC}, {nodes} nodes; {report.host['cpu']}", markup=False
    )
    print_index_rows(rows, display.out)
    if json is not None:
        json.write_text(report.as_json(), encoding="utf-8")
        display.out.print(f"wrote {json}", markup=False)


def print_index_rows(rows: list[Row], console: Console) -> None:
    """One line per comparison."""
    table = Table(pad_edge=False)
    for title in ("data", "row"):
        table.add_column(title, no_wrap=True)
    for title in ("ours", "theirs", "ratio", "limit"):
        table.add_column(title, justify="right")
    for title in ("unit", "met"):
        table.add_column(title)
    for row in rows:
        numbers = (row.ours, row.theirs, row.ratio, row.limit)
        met = "-" if row.is_met is None else "yes" if row.is_met else "NO"
        table.add_row(row.data, row.name, *("-" if x is None else f"{x:.3f}" for x in numbers), row.unit, met)
    console.print(table)
