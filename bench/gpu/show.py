"""Tables of what was found. A speed stands only beside what its outputs were checked against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .parts import Options
from .record import Row
from .tasks import Part

Columns = Mapping[str, Callable[[Row], str]]
_DRY = "A DRY WALK: tiny shapes on a CPU. It shows that the code runs; no figure means anything."
_WAYS = {
    "ours": "ours",
    "fa3 graph": "FA3",
    "fa3 auto": "FA3 auto",
    "fa3 context": "FA3 context",
    "fa3 merged": "and merge",
}
"""Ways of attention -> columns."""


def everything(
    console: Console, options: Options, parts: Sequence[Part], rows: Sequence[Row], notes: Sequence[str]
) -> None:
    """All tables, the overview last: what is read first when only the end is at hand."""
    done = [row for row in rows if row.state == "done"]
    if options.is_dry:
        console.print(_DRY)
    for draw in (_installed, _engines, _identity, _kernels, _speed, _device, _memory):
        draw(console, [row for row in done if row.params["kind"] in _KINDS[draw]])
    for row in rows:
        if row.state == "failed":
            _line(console, f"FAILED {row.step}, {row.name}: {_first(row.error)}")
        elif row.is_right is False:
            _line(console, f"WRONG {row.step}, {row.name}: {row.values.get('checked')} {_first(str(_wrong(row)))}")
    told = [f"{row.name}: {note}" for row in done for note in row.values.get("notes", ())]
    for note in dict.fromkeys([*told, *notes]):
        _line(console, f"note: {note[:300]}")
    _overview(console, options, parts, rows)


def _overview(console: Console, options: Options, parts: Sequence[Part], rows: Sequence[Row]) -> None:
    table = _table("Steps" + (" (dry)" if options.is_dry else ""), ("step",))
    for name in ("rows", "right", "wrong", "measured", "failed", "left", "seconds"):
        table.add_column(name, justify="right")
    steps = dict.fromkeys(part.step for part in parts)
    for step in steps:
        planned = sum(len(part.tasks) for part in parts if part.step == step)
        mine = [row for row in rows if row.step == step]
        done = [row for row in mine if row.state == "done"]
        failed = sum(row.state == "failed" for row in mine)
        counts = [sum(row.is_right is value for row in done) for value in (True, False, None)]
        seconds = sum(row.seconds or 0.0 for row in mine)
        cells = [planned, *counts, failed, planned - len(done) - failed]
        table.add_row(step, *map(str, cells), f"{seconds:.0f}")
    console.print(table)


def _installed(console: Console, rows: Sequence[Row]) -> None:
    for row in rows:
        _line(console, "installed: " + ", ".join(f"{name} {value}" for name, value in row.values.items()))


def _engines(console: Console, rows: Sequence[Row]) -> None:
    table = _table("Engines", ("step", "engine", "runner", "attention", "graphs", "captured"))
    for name in ("async", "start s", "MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        for name, found in row.values.items():
            if "failed" in found:
                table.add_row(row.step, name, f"did not start: {_first(found['failed'])[:80]}")
                continue
            runner = found["runner"][0].rpartition(".")[2] + (" (V2)" if found["is_v2"] else " (V1)")
            flash = "/".join(version for version in found["flash_attention"] if version != "None")
            attention = "/".join(found["attention"]) + (f" FA{flash}" if flash else "")
            captured = ", ".join(f"{kind} {count}" for kind, count in found["graphs"].items())
            mode = found["cudagraph_mode"].rpartition(".")[2].partition(":")[0]
            is_async = "yes" if found["is_async"] else "no"
            memory = number(found["device_mib"], digits=0)
            table.add_row(
                row.step, name, runner, attention, mode, captured, is_async, number(found["start_s"], digits=0), memory
            )
    _print(console, table)


def _identity(console: Console, rows: Sequence[Row]) -> None:
    columns: Columns = {
        "identical": _verdict,
        "compared": lambda row: str(row.values["compared"]),
        "parted": lambda row: str(len(row.values["partings"])),
        "ties": lambda row: str(row.values["ties"]),
        "worst gap": lambda row: _worst_gap(row),
        "drafted": lambda row: str(row.values.get("drafted", "-")),
        "accepted": lambda row: str(row.values.get("accepted", "-")),
        "branches": lambda row: str(row.values.get("branches_committed", "-")),
        "steps": lambda row: f"{row.values.get('stock_steps', '-')} -> {row.values['steps']}",
    }
    _rows(console, "Tokens against stock's", rows, columns)


def _worst_gap(row: Row) -> str:
    """Most by which a logit had to be raised to prove a tie."""
    gaps = [parting["gap"] for parting in row.values["partings"]]
    if not gaps:
        return "-"
    return "unknown" if None in gaps else f"{max(gaps):g}"


def _kernels(console: Console, rows: Sequence[Row]) -> None:
    def time(way: str) -> Callable[[Row], str]:
        return lambda row: us(row.values["times"].get(way))

    columns: Columns = {
        "right": _verdict,
        **{title: time(way) for way, title in _WAYS.items()},
        "roof": lambda row: number(row.values["roof_us"], digits=1),
        "x FA3": lambda row: number(over_flash(row.values["times"])),
    }
    _rows(
        console,
        "Kernels, microseconds of one call in a CUDA graph: median and half of the quartiles' distance",
        rows,
        columns,
    )


def over_flash(times: Mapping[str, Any]) -> float | None:
    """How many times FlashAttention 3's time ours takes, as vLLM calls that in its graphs."""
    if "ours" not in times or "fa3 graph" not in times:
        return None
    return times["ours"]["median_us"] / times["fa3 graph"]["median_us"]


def _speed(console: Console, rows: Sequence[Row]) -> None:
    def of_row(name: str, unit: str = "") -> Callable[[Row], str]:
        return lambda row: number(row.values["row"][name], unit)

    columns: Columns = {
        "checked": lambda row: "not compared" if row.is_right is None else f"{row.values['parted']} parted",
        "decode only": of_row("decode_speedup", "x"),
        "whole": of_row("speedup", "x"),
        "tokens/step": lambda row: number(_tokens_per_step(row.values["row"])),
        "nodes/step": of_row("nodes_per_step"),
        "step ms": lambda row: number(row.values.get("step_ms")),
        "stock ms": lambda row: number(row.values.get("stock_step_ms")),
        "wait ms": lambda row: number((row.values.get("split") or {}).get("wait_ms")),
        "draft ms": lambda row: number((row.values.get("split") or {}).get("draft_ms")),
        "stale": lambda row: str(row.values.get("stale", "-")),
    }
    _rows(console, "Engines against stock vLLM without speculation; logits of deviation 0.05", rows, columns)


def _tokens_per_step(row: Mapping[str, Any]) -> float | None:
    """From steps, for all alike; unknown where the outputs differ."""
    return None if row["speedup"] is None else row["output_tokens"] / row["batch"] / row["steps"]


def _device(console: Console, rows: Sequence[Row]) -> None:
    def top(row: Row) -> str:
        steps = max(1, row.values["steps"])
        return ", ".join(f"{name[:28]} {ms / steps:.2f}" for name, ms, _ in row.values["kernels"][:2])

    columns: Columns = {
        "checked": lambda row: f"{row.values['parted']} parted",
        "step ms": lambda row: number(row.values["step_ms"]),
        "busy ms": lambda row: number(row.values["busy_ms"]),
        "idle ms": lambda row: number(row.values["idle_ms"]),
        "wait ms": lambda row: number(row.values["wait_ms"]),
        "costliest, ms per step": top,
    }
    _rows(console, "What the device does in a step; busy as profiled, step as timed without", rows, columns)


def _memory(console: Console, rows: Sequence[Row]) -> None:
    columns: Columns = {
        "device MiB": lambda row: number(row.values["device_mib"], digits=0),
        "logged MiB": lambda row: number(row.values["logged_mib"], digits=0),
        "estimate MiB": lambda row: number(row.values["estimated_mib"], digits=0),
    }
    _rows(console, "Device memory of engines that differ in their graphs", rows, columns)


_KINDS: dict[Callable[[Console, Sequence[Row]], None], tuple[str, ...]] = {
    _installed: ("installed",),
    _engines: ("engines",),
    _identity: ("stock", "identity"),
    _kernels: ("attention", "verify", "commit"),
    _speed: ("speed", "rival"),
    _device: ("profile",),
    _memory: ("memory",),
}


def number(value: float | None, unit: str = "", digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def us(time: Mapping[str, Any] | None) -> str:
    """Median microseconds, and half the distance of the quartiles."""
    return "-" if time is None else f"{time['median_us']:.1f} ±{(time['high_us'] - time['low_us']) / 2:.1f}"


def _verdict(row: Row) -> str:
    if row.is_right is None:
        return "-"
    return "yes" if row.is_right else "NO"


def _wrong(row: Row) -> Any:
    return row.values.get("partings") or (row.values.get("row") or {}).get("difference") or ""


def _first(text: str) -> str:
    return (text.strip().splitlines() or ["?"])[0][:200]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False, box=box.SIMPLE_HEAD, show_edge=False)
    for name in columns:
        table.add_column(name)
    return table


def _rows(console: Console, title: str, rows: Sequence[Row], columns: Columns) -> None:
    """One line per row; nothing at all without rows."""
    table = _table(title, ("step", "row"))
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.step, row.name, *(show(row) for show in columns.values()))
    _print(console, table)


def _print(console: Console, table: Table) -> None:
    if table.row_count:
        console.print(table)
        console.print()


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
