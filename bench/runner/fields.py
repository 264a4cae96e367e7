"""Rows of reports, and the one declaration of what they may tell: a field's columns, and whether it is kept. Pure.

A scenario makes rows of these fields. Its JSON has them all, bench/results those that are kept, and a table in a
terminal or in docs/benchmarks.md names its columns by them. docs/reference/bench.md says what each means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Columns = Mapping[str, str | Callable[[Any], Any]]
"""Title -> what a row (a dataclass or a mapping) has there: a function of it, or its field's name and unit."""


@dataclass(frozen=True, slots=True)
class Field:
    """What a row may tell under this name, or what is shown of several."""

    # above its column; empty: the field's name
    title: str = ""
    unit: str = ""
    # in bench/results, of rows that are paired with stock; of a GPU's
    is_kept: bool = False
    is_kept_of_gpu: bool = False
    # a text of the row; None: the value
    show: Callable[[Any], Any] | None = None


def value(row: Any, name: str) -> Any:
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)


def number(value: Any, unit: str = "", no: str = "NO") -> str:
    """A figure, a word or a verdict; `-` where there is nothing to tell."""
    if value is None or isinstance(value, bool):
        return {True: "yes", False: no, None: "-"}[value]
    return f"{value:.2f}{unit}" if isinstance(value, float) else f"{value}{unit}"


def span(ends: Sequence[float] | None) -> str | None:
    """Lower and upper quartile."""
    return None if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"


def speedup(row: Mapping[str, Any]) -> str | None:
    """Median, quartiles in brackets; nothing of outputs that differ."""
    if row.get("speedup") is None:
        return None if row.get("identical") is not False else "outputs differ"
    ends = None if row.get("rounds") == 1 else row.get("speedup_quartiles") or row.get("quartiles")
    return f"{row['speedup']:.2f}x" + (f" ({span(ends)})" if ends else "")


def _time(way: str) -> Callable[[Mapping[str, Any]], str | None]:
    """Median and quartiles of one way of computing the same, in microseconds."""

    def show(row: Mapping[str, Any]) -> str | None:
        time = row.get("times", {}).get(way)
        return None if time is None else f"{time['median_us']:.1f} ({time['low_us']:.1f} to {time['high_us']:.1f})"

    return show


def _way(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Measured; and of runs that were estimated too, the estimate with its error."""

    def show(row: Mapping[str, Any]) -> str:
        own = row["ways"][name]
        if own.get("speedup") is None:
            return "outputs differ"
        measured = f"{own['speedup']:.2f}x ({span(own['quartiles'])})"
        if own.get("estimated") is None:
            return measured
        return f"{measured}; {own['estimated']:.2f}x, {own['estimated'] / own['speedup'] - 1.0:+.0%}"

    return show


def _judged(name: str) -> Callable[[Mapping[str, Any]], str | None]:
    """Of memory, the growth as a share; of all else a number."""

    def show(row: Mapping[str, Any]) -> str | None:
        value = row.get(name)
        shape = "{:.2%}" if row["name"].startswith("memory") else "{:.10g}"
        return None if value is None else shape.format(value)

    return show


_KEPT, _OF_GPU, _TOLD = Field(is_kept=True), Field(is_kept_of_gpu=True), Field()
FIELDS: Mapping[str, Field] = {
    # which row: of a paired one also requests at once, and the most draft tokens per request and step
    **dict.fromkeys(("name", "batch", "draft", "pattern", "accuracy", "seed"), _KEPT),
    **dict.fromkeys(("data", "drafter", "temperature", "window", "ladder", "chosen", "engines", "rounds"), _TOLD),
    # whether all outputs are stock's, and the first difference in words
    **dict.fromkeys(("identical", "difference"), _KEPT),
    # a check held, or outputs are stock's but for ties that are allowed there; and against what, with notes
    "passed": Field("right"),
    **dict.fromkeys(("checked", "notes", "detail"), _TOLD),
    # outputs part at proven ties at most; nothing differs beside any of what is compared; where they part, in words
    **dict.fromkeys(("is_proven", "is_comparable", "differences"), _TOLD),
    "ties": _OF_GPU,
    # of the last run: requests, tokens, engine steps; per request and decode step tokens, and nodes verified
    **dict.fromkeys(("num_requests", "output_tokens", "steps", "stock_steps"), _KEPT),
    "steps_of_both": Field("steps", show=lambda row: f"{value(row, 'stock_steps')} -> {value(row, 'steps')}"),
    "tokens_per_step": Field("tokens/step", is_kept=True),
    "nodes_per_step": Field("nodes/step", is_kept=True),
    "verified_per_accepted": Field("verified/ accepted", is_kept=True),
    # stock's seconds by ours: median over rounds, its quartiles, and as a text
    "speedup": Field("speed-up", "x", is_kept=True),
    "speedup_quartiles": Field("quartiles", is_kept=True, show=lambda row: span(value(row, "speedup_quartiles"))),
    "speedup_told": Field("speed-up", show=speedup),
    # what stock's step times allow, the share of it that was reached, and the ratio without the prompts' step
    "ideal": Field("", "x", is_kept=True),
    "efficiency": _KEPT,
    "decode_speedup": Field("decode only", "x", is_kept=True),
    "makespan_s": Field("makespan, s", is_kept=True),
    "stock_makespan_s": _KEPT,
    "makespans": Field("makespan s", show=lambda row: f"{number(row.stock_makespan_s)} -> {number(row.makespan_s)}"),
    "tokens_per_s": Field("tokens a second", is_kept=True),
    "stock_tokens_per_s": Field("stock's", is_kept=True),
    "overhead_ms_per_step": Field("overhead ms/step", is_kept=True),
    "draft_ms_per_step": _TOLD,
    # tokens per request -> milliseconds of a stock step at this batch; per timed round stock's seconds and ours
    **dict.fromkeys(("stock_step_ms", "rounds_s"), _TOLD),
    # milliseconds of a step, ours and stock's
    "step_ms": Field("step, ms", is_kept=True),
    "stock_ms": Field("stock's, ms", is_kept=True),
    # on the row of `auto`: the best other makespan by its own, whose that is, or that draft length
    **dict.fromkeys(("auto_to_best", "best_draft", "best"), _KEPT),
    "auto_told": Field(
        "auto / best", show=lambda row: f"{row['auto_to_best']:.2f} ({row['best']})" if row.get("best") else None
    ),
    # 75th percentile of the answers' lengths by the longest; steps by whether they drafted, and changes between such
    **dict.fromkeys(("length_ratio", "switches", "steps_on", "steps_off"), _KEPT),
    "mind_changes": _TOLD,
    # tokens up to the first difference; drafted nodes, accepted ones, steps that accepted another branch than the first
    "compared": Field("tokens compared", is_kept_of_gpu=True),
    **dict.fromkeys(("drafted", "accepted", "branches"), _OF_GPU),
    # requests whose answers the oracle no longer knew, behind a tie
    "stale": _TOLD,
    "proven_ties": Field(
        "proven ties", show=lambda row: None if row.get("compared") is None else len(row.get("ties") or ())
    ),
    # a figure beside what was predicted of it, and its quartiles; times by way of computing the same
    **dict.fromkeys(("unit", "measured", "predicted", "quartiles", "times"), _OF_GPU),
    "step": _TOLD,
    "ours_us": Field("ours, us", show=_time("ours")),
    "flash_us": Field("FA3, us", show=_time("fa3 graph")),
    # ours beside theirs, their ratio, its limit
    **dict.fromkeys(("ours", "theirs", "ratio", "limit"), _TOLD),
    "is_met": Field("met"),
    # a model that drafts: positions, what rejection sampling would accept, shares by first choice and by first two
    **dict.fromkeys(("positions", "greedy", "shared", "learned"), _TOLD),
    "overlap": Field("1 - d"),
    **{f"{way}_two": Field(f"{way}, two") for way in ("greedy", "shared", "learned")},
    "two_told": Field(
        "two / (1 - d)",
        show=lambda row: number(row["learned_two"] / row["overlap"] if row["overlap"] else None, "x"),
    ),
    "sharpness": Field(show=lambda row: f"{row['sharpness']:g}"),
    "draft_ms": Field("ms per draft"),
    # way to draft -> speedup, quartiles, tokens_per_step; the fastest measured; stock's speed in a round over its
    # median. In kept rows also estimated, and the fastest by estimate
    **dict.fromkeys(("ways", "fastest", "planned"), _TOLD),
    "stock_quartiles": Field("stock itself", show=lambda row: span(row.get("stock_quartiles"))),
    "coupled_told": Field("coupled; estimated", show=_way("coupled")),
    "decoupled_told": Field("decoupled; estimated", show=_way("decoupled")),
    # of a ladder: against the fastest of those that are named, requests that moved, drafters that were lent
    "ladder_told": Field(
        "ladder", show=lambda row: row["ladder"] + (f": {row['chosen']}" if row["ladder"] == "auto" else "")
    ),
    "of_best": Field("of the best", show=lambda row: "" if row.get("of_best") is None else f"{row['of_best']:.2f}"),
    **dict.fromkeys(("moved", "lent"), _TOLD),
    # of a driver: share of a core, and what its stand-ins take beside it; ms of processor time of a decision, and of
    # the one that deals
    "share": Field("of one core", show=lambda row: f"{row['share']:.0%}"),
    "stand_ins": Field("stand-ins", show=lambda row: f"{row['stand_ins']:.0%}"),
    "decision_ms": Field("a decision, ms", show=lambda row: f"{row['decision_ms']:.2f}"),
    "first_ms": Field("the first, ms", show=lambda row: f"{row['first_ms']:.0f}"),
    **dict.fromkeys(("reports", "complete"), _TOLD),
    # of a server: quartiles of its ratio, and what it adds to the time of an output token
    "ratio_quartiles": Field("quartiles", show=lambda row: span(value(row, "ratio_quartiles"))),
    "added_us": Field("added to a token, us"),
    # of a soak: at the beginning, at the end, what is judged of it, and its limit
    **dict.fromkeys(("first", "last", "value"), _TOLD),
    "value_told": Field("value", show=_judged("value")),
    "limit_told": Field("limit", show=_judged("limit")),
    # of an RL loop
    **dict.fromkeys(("epoch", "engine", "weights_version", "runs", "update", "train_s", "push_s"), _TOLD),
    # share of problems with a right answer, of answers cut off; requests whose tokens are not stock's
    **dict.fromkeys(("solved", "mean_tokens", "cut_share", "wall_s", "num_tokens", "num_differing"), _TOLD),
    "seconds": Field(show=lambda row: None if row.get("identical") is False else f"{row['wall_s']:.1f}"),
    # of stock's answers, which are ours too; vLLM's own methods answer otherwise
    "reward": Field(show=lambda row: row["reward"] if row["engine"] == "stock" else None),
    # of heads that learn: tokens accepted per draft, and by the first epoch's; rows learned from and heads published by
    # then, and the trainer's seconds; of all tokens
    "accepted_per_draft": Field("accepted a draft", is_kept=True),
    "of_first": Field("of the first epoch's", is_kept=True),
    "learned_rows": Field("rows learned", is_kept=True),
    "published": Field("heads", is_kept=True),
    "trainer_s": Field("trainer, s", is_kept=True),
    "digest": Field("tokens", is_kept=True),
    "commit": _TOLD,
}


class Row(dict[str, Any]):
    """One line of a report: values of `FIELDS`, which are its attributes as well. None: not measured, or not told."""

    def __init__(self, **told: Any) -> None:
        if unknown := told.keys() - FIELDS.keys():
            raise KeyError(f"no fields of a row: {', '.join(sorted(unknown))}")
        super().__init__(told)

    def __getattr__(self, name: str) -> Any:
        if name not in FIELDS:
            raise AttributeError(name)
        return self.get(name)

    def but(self, **more: Any) -> Row:
        """This row with other values, or further ones."""
        return Row(**{**self, **more})


def columns(*named: str) -> Columns:
    """Columns of these fields; `field: title` where it has another title in this table."""
    found: dict[str, str | Callable[[Any], Any]] = {}
    for one in named:
        name, _, title = one.partition(": ")
        known = FIELDS[name]
        found[title or known.title or name] = known.show or f"{name} {known.unit}"
    return found


def cells(rows: Sequence[Any], columns: Columns, no: str = "NO") -> list[list[str]]:
    """A line of texts per row."""

    def cell(row: Any, column: str | Callable[[Any], Any]) -> str:
        if isinstance(column, str):
            name, _, unit = column.partition(" ")
            return number(value(row, name), unit, no)
        return number(column(row), no=no)

    return [[cell(row, column) for column in columns.values()] for row in rows]
