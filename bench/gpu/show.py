"""Tables of what was found. A speed stands only beside what its outputs were checked against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .parts import Options
from .record import Part, Row

_DRY = "A DRY WALK: tiny shapes on a CPU. It shows that the code runs; no figure means anything."


def everything(
    console: Console, options: Options, parts: Sequence[Part], rows: Sequence[Row], notes: Sequence[str]
) -> None:
    """All tables, the overview last: what is read first when only the end is at hand."""
    done = [row for row in rows if row.state == "done"]
    if options.is_dry:
        console.print(_DRY)
    for row in done:
        if row.params["kind"] == "installed":
            _line(console, "installed: " + ", ".join(f"{name} {value}" for name, value in row.values.items()))
    _print(console, _engines([row for row in done if row.params["kind"] == "engines"]))
    for title, kinds, columns in _TABLES:
        table = _table(title, ("step", "row"), columns)
        for row in done:
            if row.params["kind"] in kinds:
                table.add_row(row.step, row.name, *(cell(row, row.values) for cell in columns.values()))
        _print(console, table)
    for row in rows:
        if row.state == "failed":
            _line(console, f"FAILED {row.step}, {row.name}: {_first(row.error)}")
        elif row.is_right is False:
            wrong = row.values.get("partings") or (row.values.get("row") or {}).get("difference") or ""
            _line(console, f"WRONG {row.step}, {row.name}: {row.values.get('checked')} {_first(str(wrong))}")
    told = [f"{row.name}: {note}" for row in done for note in row.values.get("notes", ())]
    for note in dict.fromkeys([*told, *notes]):
        _line(console, f"note: {note[:300]}")
    console.print(_overview(options, parts, rows))


def _overview(options: Options, parts: Sequence[Part], rows: Sequence[Row]) -> Table:
    titles = ("rows", "right", "wrong", "measured", "failed", "left", "seconds")
    table = _table("Steps" + (" (dry)" if options.is_dry else ""), ("step",), titles)
    for step in dict.fromkeys(part.step for part in parts):
        planned = sum(len(part.tasks) for part in parts if part.step == step)
        mine = [row for row in rows if row.step == step]
        done = [row for row in mine if row.state == "done"]
        failed = sum(row.state == "failed" for row in mine)
        counts = [sum(row.is_right is value for row in done) for value in (True, False, None)]
        seconds = sum(row.seconds or 0.0 for row in mine)
        cells = [planned, *counts, failed, planned - len(done) - failed]
        table.add_row(step, *map(str, cells), f"{seconds:.0f}")
    return table


def _engines(rows: Sequence[Row]) -> Table:
    left = ("step", "engine", "runner", "attention", "graphs", "captured")
    table = _table("Engines", left, ("async", "start s", "MiB"))
    for row in rows:
        for name, found in row.values.items():
            if "failed" in found:
                table.add_row(row.step, name, f"did not start: {_first(found['failed'])[:80]}")
                continue
            flash = "/".join(version for version in found["flash_attention"] if version != "None")
            table.add_row(
                row.step,
                name,
                found["runner"][0].rpartition(".")[2] + (" (V2)" if found["is_v2"] else " (V1)"),
                "/".join(found["attention"]) + (f" FA{flash}" if flash else ""),
                found["cudagraph_mode"].rpartition(".")[2].partition(":")[0],
                ", ".join(f"{kind} {count}" for kind, count in found["graphs"].items()),
                "yes" if found["is_async"] else "no",
                number(found["start_s"], digits=0),
                number(found["device_mib"], digits=0),
            )
    return table


def over_flash(times: Mapping[str, Any]) -> float | None:
    """How many times FlashAttention 3's time ours takes, as vLLM calls that in its graphs."""
    if "ours" not in times or "fa3 graph" not in times:
        return None
    return times["ours"]["median_us"] / times["fa3 graph"]["median_us"]


def number(value: float | None, unit: str = "", digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def us(time: Mapping[str, Any] | None) -> str:
    """Median microseconds, and half the distance of the quartiles."""
    return "-" if time is None else f"{time['median_us']:.1f} ±{(time['high_us'] - time['low_us']) / 2:.1f}"


_Cell = Callable[[Row, dict[str, Any]], str]
"""A column's text, from a row and its values."""
_Columns = dict[str, _Cell]


def _value(path: str, told: Callable[[Any], str] = str) -> _Cell:
    """`row.speedup`: the value `speedup` of the value `row`; a dash where there is none."""

    def text(_: Row, values: dict[str, Any]) -> str:
        found: Any = values
        for name in path.split("."):
            found = (found or {}).get(name)
        return "-" if found is None else told(found)

    return text


def _number(path: str, unit: str = "", digits: int = 2) -> _Cell:
    return _value(path, lambda found: number(found, unit, digits))


def _verdict(row: Row, _: object) -> str:
    return {None: "-", True: "yes", False: "NO"}[row.is_right]


def _worst_gap(_: Row, values: dict[str, Any]) -> str:
    """Most by which a logit had to be raised to prove a tie."""
    gaps = [parting["gap"] for parting in values["partings"]]
    if None in gaps:
        return "unknown"
    return f"{max(gaps):g}" if gaps else "-"


def _tokens_per_step(_: Row, values: dict[str, Any]) -> str:
    """From steps, for all alike; unknown where the outputs differ."""
    row = values["row"]
    return number(None if row["speedup"] is None else row["output_tokens"] / row["batch"] / row["steps"])


def _costliest(_: Row, values: dict[str, Any]) -> str:
    steps = max(1, values["steps"])
    return ", ".join(f"{name[:28]} {ms / steps:.2f}" for name, ms, _ in values["kernels"][:2])


_IDENTITY: _Columns = {
    "identical": _verdict,
    "compared": _value("compared"),
    "parted": _value("partings", lambda found: str(len(found))),
    "ties": _value("ties"),
    "worst gap": _worst_gap,
    "drafted": _value("drafted"),
    "accepted": _value("accepted"),
    "branches": _value("branches_committed"),
    "steps": lambda _, values: f"{values.get('stock_steps', '-')} -> {values['steps']}",
}
_KERNELS: _Columns = {
    "right": _verdict,
    "ours": _value("times.ours", us),
    "FA3": _value("times.fa3 graph", us),
    "FA3 auto": _value("times.fa3 auto", us),
    "FA3 context": _value("times.fa3 context", us),
    "and merge": _value("times.fa3 merged", us),
    "roof": _number("roof_us", digits=1),
    "x FA3": lambda _, values: number(over_flash(values["times"])),
}
_SPEED: _Columns = {
    "checked": lambda row, values: "not compared" if row.is_right is None else f"{values['parted']} parted",
    "decode only": _number("row.decode_speedup", "x"),
    "whole": _number("row.speedup", "x"),
    "tokens/step": _tokens_per_step,
    "nodes/step": _number("row.nodes_per_step"),
    "step ms": _number("step_ms"),
    "stock ms": _number("stock_step_ms"),
    "wait ms": _number("split.wait_ms"),
    "draft ms": _number("split.draft_ms"),
    "stale": _value("stale"),
}
_DEVICE: _Columns = {
    "checked": _value("parted", lambda found: f"{found} parted"),
    "step ms": _number("step_ms"),
    "busy ms": _number("busy_ms"),
    "idle ms": _number("idle_ms"),
    "wait ms": _number("wait_ms"),
    "costliest, ms per step": _costliest,
}
_MEMORY: _Columns = {
    "device MiB": _number("device_mib", digits=0),
    "logged MiB": _number("logged_mib", digits=0),
    "estimate MiB": _number("estimated_mib", digits=0),
}
_PER_CALL = "Kernels, microseconds of one call in a CUDA graph: median and half of the quartiles' distance"
_TABLES: tuple[tuple[str, tuple[str, ...], _Columns], ...] = (
    ("Tokens against stock's", ("stock", "identity"), _IDENTITY),
    (_PER_CALL, ("attention", "verify", "commit"), _KERNELS),
    ("Engines against stock vLLM without speculation; logits of deviation 0.05", ("speed", "rival"), _SPEED),
    ("What the device does in a step; busy as profiled, step as timed without", ("profile",), _DEVICE),
    ("Device memory of engines that differ in their graphs", ("memory",), _MEMORY),
)
"""(title, kinds of rows, columns)"""


def _first(text: str) -> str:
    return (text.strip().splitlines() or ["?"])[0][:200]


def _table(title: str, left: Sequence[str], right: Sequence[str] | _Columns) -> Table:
    table = Table(*left, title=title, title_justify="left", pad_edge=False, box=box.SIMPLE_HEAD, show_edge=False)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _print(console: Console, table: Table) -> None:
    """Nothing at all without rows."""
    if table.row_count:
        console.print(table)
        console.print()


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
