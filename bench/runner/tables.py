"""Tables of what scenarios found: columns that a terminal and the kept page share, and the page's Markdown. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .report import Columns, number, span

Row = Mapping[str, Any]


def speedup(row: Row) -> str:
    """Median, quartiles in brackets; nothing of outputs that differ."""
    if row.get("speedup") is None:
        return "-" if row.get("identical") is not False else "outputs differ"
    if row.get("rounds", 1) == 1:
        return f"{row['speedup']:.2f}x"
    low, high = row["speedup_quartiles"]
    return f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f})"


def table(rows: Sequence[Row], columns: Columns) -> str:
    lines = [list(columns), ["---"] * len(columns), *([show(row) for show in columns.values()] for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def field(name: str, unit: str = "") -> Callable[[Row], str]:
    return lambda row: number(row.get(name), unit)


def verdict(name: str, no: str = "no") -> Callable[[Row], str]:
    return lambda row: {True: "yes", False: no, None: "-"}[row.get(name)]


_SHARED: Columns = {"speed-up": speedup, "makespan, s": field("makespan_s")}
_STEPS: Columns = {"steps": lambda row: f"{row['stock_steps']} -> {row['steps']}"}
_ROLLOUT: Columns = {
    **{name: field(name) for name in ("name", "batch", "draft")},
    **_SHARED,
    "ideal": field("ideal", "x"),
    **_STEPS,
}
_DECODE: Columns = {**_ROLLOUT, "seed": field("seed"), "rounds": field("rounds"), "commit": field("commit")}
_GRPO: Columns = {
    **{name: field(name) for name in ("epoch", "engine")},
    "seconds": lambda row: "-" if row.get("identical") is False else f"{row['wall_s']:.1f}",
    "steps": field("steps"),
    "speed-up": field("speedup", "x"),
    # of stock's answers, which are ours too; vLLM's own methods answer otherwise
    "reward": lambda row: number(row["reward"]) if row["engine"] == "stock" else "-",
}
_LOAD: Columns = {
    "pattern": field("pattern"),
    "budget": field("name"),
    **_SHARED,
    "switches": field("switches"),
    "auto / best": lambda row: "-" if row.get("best") is None else f"{row['auto_to_best']:.2f} ({row['best']})",
}
INDEX: Columns = {
    **{name: field(name) for name in ("data", "name", "unit", "ours", "theirs", "ratio", "limit")},
    "met": verdict("is_met"),
}


MET: Columns = {
    **{name: field(name) for name in ("drafter", "temperature", "positions")},
    "1 - d": field("overlap"),
    **{name: field(name) for name in ("greedy", "shared", "learned")},
    "greedy, two": field("greedy_two"),
    "shared, two": field("shared_two"),
    "learned, two": field("learned_two"),
    "two / (1 - d)": lambda row: number(row["learned_two"] / row["overlap"] if row["overlap"] else None, "x"),
    "sharpness": lambda row: f"{row['sharpness']:g}",
    "ms per draft": field("draft_ms"),
}


def drafters_tables(run: Mapping[str, Any]) -> str:
    """How often each one is met; and, where they were timed, the arms."""
    met = [row for row in run["rows"] if "overlap" in row]
    timed = [row for row in run["rows"] if "overlap" not in row]
    tables = [table(rows, columns) for rows, columns in ((met, MET), (timed, _ROLLOUT)) if rows]
    return "\n\n".join(tables)


def micros(way: str) -> Callable[[Row], str]:
    """Median and quartiles of one way of computing the same."""

    def show(row: Row) -> str:
        time = row.get("times", {}).get(way)
        return "-" if time is None else f"{time['median_us']:.1f} ({time['low_us']:.1f} to {time['high_us']:.1f})"

    return show


_GPU: Columns = {
    **{name: field(name) for name in ("step", "name")},
    "right": verdict("passed", no="NO"),
    "ours, us": micros("ours"),
    "FA3, us": micros("fa3 graph"),
    "roof, us": field("roof_us"),
    "step, ms": field("step_ms"),
    "stock's, ms": field("stock_ms"),
    "idle, ms": field("idle_ms"),
}


def _told_epochs(rows: Sequence[Row]) -> list[Row]:
    """With many engines, the first epoch and the sums: all the others are in the file."""
    is_long = len({row["engine"] for row in rows}) > 3
    return [row for row in rows if not is_long or row["epoch"] in ("1", "2 on", "all")]


def sweep_table(run: Mapping[str, Any]) -> str:
    """A line per cell: `auto`, then every fixed draft length."""
    cells: dict[tuple[Any, Any], dict[Any, Row]] = {}
    for row in run["rows"]:
        cells.setdefault((row.get("accuracy"), row["batch"]), {})[row["draft"]] = row
    columns: dict[str, Callable[[Any], Any]] = {
        "accuracy": lambda cell: number(cell[0]),
        "batch": lambda cell: cell[1],
        "auto": lambda cell: speedup(cells[cell][0]),
    }
    for draft in run["settings"]["drafts"]:
        columns[f"{draft} tokens"] = lambda cell, draft=draft: number(cells[cell].get(draft, {}).get("speedup"), "x")
    columns["auto / best fixed"] = lambda cell: number(cells[cell][0].get("auto_to_best"))
    return table(list(cells), columns)  # type: ignore[arg-type]


def below_stock(run: Mapping[str, Any]) -> str:
    """How many of `auto`'s cells are slower than stock, and which; empty if none is."""
    told = [row for row in run["rows"] if row["name"] == "auto" and row.get("speedup") is not None]
    slow = sorted((row for row in told if row["speedup"] < 0.97), key=lambda row: row["speedup"])
    if not slow:
        return ""
    cells = [
        f"batch {row['batch']}"
        + (f" at accuracy {row['accuracy']:g}" if row.get("accuracy") is not None else "")
        + f" ({row['speedup']:.3f}x)"
        for row in slow
    ]
    count = f"in {len(slow)} of {len(told)} cells of the sweep"
    return f"- **{run['settings']['model']}**: `auto` is below 0.97x stock {count}: {', '.join(cells)}.\n"


def way(name: str) -> Callable[[Row], str]:
    """Measured, and the estimate with its error."""

    def show(row: Row) -> str:
        own = row["ways"][name]
        if own.get("speedup") is None:
            return "outputs differ"
        low, high = own["quartiles"]
        measured = f"{own['speedup']:.2f}x ({low:.2f} to {high:.2f})"
        if own["estimated"] is None:
            return measured
        return f"{measured}; {own['estimated']:.2f}x, {own['estimated'] / own['speedup'] - 1.0:+.0%}"

    return show


def line(name: str) -> Callable[[Row], str]:
    """What a step or a pass takes."""

    def show(row: Row) -> str:
        fixed, each = row["facts"][name]
        return f"{fixed:.2f} + {each:.3f} n"

    return show


DECOUPLED: Columns = {
    **{name: field(name) for name in ("drafter", "batch", "window")},
    "stock itself": lambda row: span(row.get("stock_quartiles")),
    "coupled; estimated": way("coupled"),
    "decoupled; estimated": way("decoupled"),
    **{name: field(name) for name in ("fastest", "planned")},
    "auto": field("chosen"),
    "auto loses": field("chosen_lost"),
}
_FACTS: Columns = {
    **{name: field(name) for name in ("drafter", "batch", "window")},
    "V": line("verify"),
    "D": lambda row: number(row["facts"]["draft"]),
    "V beside": line("verify_beside"),
    "D beside": line("draft_beside"),
    "among 1, 2, 4": lambda row: ", ".join(number(share) for share in row["facts"]["match"]["among"][:3]),
}
LADDER: Columns = {
    "ladder": field("ladder"),
    "makespan, s": field("makespan_s"),
    "times": lambda row: speedup({**row, "speedup_quartiles": row.get("quartiles"), "rounds": 2}),
    "ran twice": field("copied"),
    "won by helpers": field("won"),
}


SOAK: Columns = {
    "what": field("name"),
    **{name: field(name) for name in ("first", "last")},
    "value": lambda row: _judged(row, "value"),
    "limit": lambda row: _judged(row, "limit"),
    "unit": field("unit"),
    "holds": verdict("passed"),
}


def decoupled_columns(rows: Sequence[Row]) -> Columns:
    is_more = any("reconfigured" in row["ways"] for row in rows)
    return {**DECOUPLED, "reconfigured": way("reconfigured")} if is_more else DECOUPLED


def _decoupled_table(run: Mapping[str, Any]) -> str:
    return table(run["rows"], decoupled_columns(run["rows"])) + _known_before(run["rows"])


def _known_before(rows: Sequence[Row]) -> str:
    """What estimates are made of, where it was kept."""
    known = [row for row in rows if row.get("facts")]
    meaning = (
        "Estimates are made of this, learned from earlier answers. V and D are what a step of the target and a pass of"
        " the drafter take, in plain steps: without drafts, and more for each node. Beside: on fewer cores, while the"
        " other works. Among: how often the target's token is among so many choices of the drafter."
    )
    return f"\n\n{meaning}\n\n{table(known, _FACTS)}" if known else ""


def _judged(row: Row, name: str) -> str:
    """Of memory, the growth as a share; of all else a number."""
    value = row.get(name)
    if value is None:
        return "-"
    return f"{value:.2%}" if row["name"].startswith("memory") else f"{value:.10g}"


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "decode": lambda run: table(run["rows"], _DECODE),
    "rollout": lambda run: table(run["rows"], _ROLLOUT),
    "grpo": lambda run: table(_told_epochs(run["rows"]), _GRPO),
    "sweep": sweep_table,
    "load": lambda run: table(run["rows"], _LOAD),
    "drafters": drafters_tables,
    "decoupled": _decoupled_table,
    "ladder": lambda run: table(run["rows"], LADDER),
    "soak": lambda run: table(run["rows"], SOAK),
    "index": lambda run: table(run["rows"], INDEX),
    "kernels": lambda run: table(run["rows"], _GPU),
}
"""Scenario -> the table of one of its runs."""
