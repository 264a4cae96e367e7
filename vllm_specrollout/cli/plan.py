"""`specrollout plan`: what to set up before an engine starts.

`plan graphs`: which CUDA graphs to capture, and what they are estimated to take. `plan decoupled`: how many devices
draft, how many verify, and how far ahead, by rehearsal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import typer.core

from vllm_specrollout.cli import flags
from vllm_specrollout.cluster.planner import Plan, Workload, plan_devices
from vllm_specrollout.cluster.rates import AffineTime
from vllm_specrollout.cluster.rehearsal import Match
from vllm_specrollout.config import MAX_NODES
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.scheduling.cudagraphs import (
    CAPTURE_SIZES,
    MOST_DRAFTED,
    GraphMemory,
    GraphPlan,
    estimate_mib,
    naive_plan,
    plan_graphs,
    within_mib,
)
from vllm_specrollout.types import MOST_NODES

SHAPES = {
    "7B": GraphMemory(layers=28, hidden=3584, ffn=18944, qkv=(28 + 2 * 4) * 128),
    "0.5B": GraphMemory(layers=24, hidden=896, ffn=4864, qkv=(14 + 2 * 2) * 64),
}
"""Qwen2.5's."""
_MIB = {"MiB": 1.0, "GiB": 1024.0}
GONE = {
    "--tau": "leave it out: the paper's figure stands beside each plan",
    "--exits": "say it with `--match`: how often the token is among 1, 2, ... choices",
    "--exit-width": "say it with `--match`: it has as many shares as there are choices",
    "--exit-cost": "say it with `--draft-ms`: `+0.1*n`, of n nodes looked at",
}
"""Flags of the closed formulas -> what says the same now."""
_MOST_GPUS, _MOST_REQUESTS = 1 << 16, 1 << 24
_NUMBER = r"(\d+(?:\.\d+)?)"
_LINE = re.compile(rf"{_NUMBER}\+{_NUMBER}(?:\*b)?(?:\+{_NUMBER}(?:\*n)?)?")
_TERMS = ("per_request_ms", "fixed_ms", "per_row_ms")
_TITLES = (
    *("plan", "drafting", "verifying", "requests", "window"),
    *("tokens/step", "tokens/s each", "in all", "of the best", "by paper"),
)


class _Plans(typer.core.TyperGroup):
    """`plan --gpus 256 ...` is `plan decoupled --gpus 256 ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            args = ["decoupled", *args]
        for flag in args[1:] if args[:1] == ["decoupled"] else ():
            if (name := flag.split("=")[0]) in GONE:
                raise ConfigError(f"`{name}` is gone: plans are rehearsed, not computed by formula", GONE[name])
        return super().parse_args(ctx, args)


app = typer.Typer(
    help="What to set up before an engine starts.\n\nWithout a command, the options are those of `plan decoupled`.",
    cls=_Plans,
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _plan() -> None:
    """What to set up before an engine starts. Needs neither vLLM nor a GPU."""


# --- graphs -----------------------------------------------------------------------------------------------------------


@app.command("graphs")
def plan_graphs_command(
    draft: Annotated[str, typer.Option(help="Draft sizes that share the graphs, in nodes per request.")] = "8,16,32,64",
    max_num_seqs: Annotated[int, typer.Option(help="Most requests at once.")] = 256,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of a captured step; larger ones run piecewise.")
    ] = MOST_DRAFTED,
    model: Annotated[Path | None, typer.Option(help="A model's folder, for its shape.")] = None,
    shape: Annotated[str | None, typer.Option(help="7B or 0.5B, instead of a folder; default: 7B.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Also plan for a drafting model: 7B, 0.5B or its folder.")] = None,
    limit: Annotated[str, typer.Option(help="Most graphs (`40`), or most memory (`600MiB`).")] = "64",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the plan to this file.")] = None,
) -> None:
    """Plan CUDA graphs that several draft sizes share; estimate their memory beside that of one per size and batch."""
    sizes = flags.integers(draft, "--draft", 1, MAX_NODES)
    flags.in_range(max_num_seqs, "--max-num-seqs", 1, 1 << 16)
    flags.in_range(max_tokens, "--max-tokens", 1, 1 << 20)
    if model is not None and shape is not None:
        raise ConfigError("`--model` and `--shape` are both given", "give one: a shape stands for a model")
    flags.check_writable(json_file, "--json")
    named = flags.choice(shape or "7B", "--shape", tuple(SHAPES))
    memory = SHAPES[named] if model is None else read_shape(model)
    second = None if drafter is None else (SHAPES.get(drafter) or read_shape(Path(drafter), "--drafter"))
    most, most_mib = _limit(limit)
    plan = plan_graphs(sizes, CAPTURE_SIZES, max_num_seqs, max_tokens, limit=most, drafter=second is not None)
    if most_mib is not None:
        plan = within_mib(plan, most_mib, memory, second)
    rows = _rows(plan, sizes, max_num_seqs, max_tokens, second is not None)
    figures = {name: _figures(part, memory, second) for name, part in rows.items()}
    _print_graphs(figures, plan)
    if json_file is not None:
        body = {"estimate": True, "schemes": figures, "plan": asdict(plan)}
        json_file.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def read_shape(folder: Path, flag: str = "--model") -> GraphMemory:
    """A model's shape from its config.json.

    Raises:
        ConfigError: no such file, or one that lacks a size.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(
            f"`{flag}` is `{folder}`, which holds no config.json that can be read",
            f"name a model's folder{', or one of: ' + ', '.join(SHAPES) if flag == '--drafter' else ''}",
        ) from None
    config = config.get("text_config") or config
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        size = int(config.get("head_dim") or hidden // heads)
        return GraphMemory(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            ffn=int(config["intermediate_size"]),
            qkv=(heads + 2 * int(config.get("num_key_value_heads") or heads)) * size,
            dtype_bytes=4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"`{path}` does not give the model's shape: {error!r}", "use `--shape` with the nearest one"
        ) from None


def _limit(text: str) -> tuple[int | None, float | None]:
    """(most graphs, most MiB); one of them is set."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MiB|GiB)?", text.strip())
    if match is None or (match[2] is None and "." in match[1]) or float(match[1]) == 0:
        raise ConfigError(f"`--limit` is {text!r}, neither a number of graphs nor a size", "write `40` or `600MiB`")
    return (int(match[1]), None) if match[2] is None else (None, float(match[1]) * _MIB[match[2]])


def _rows(
    plan: GraphPlan, sizes: tuple[int, ...], max_num_seqs: int, max_tokens: int, drafter: bool
) -> dict[str, GraphPlan]:
    """The plan after what it replaces, and after all that would save anything."""
    every = plan_graphs(sizes, CAPTURE_SIZES, max_num_seqs, max_tokens, drafter=drafter)
    return {
        "naive, every pair": naive_plan(sizes, CAPTURE_SIZES, max_num_seqs, drafter=drafter),
        f"naive, to {max_tokens} tokens": naive_plan(sizes, CAPTURE_SIZES, max_num_seqs, max_tokens, drafter=drafter),
        "shared, no limit": every,
        "shared (the plan)": plan,
    }


def _figures(plan: GraphPlan, memory: GraphMemory, drafter: GraphMemory | None) -> dict[str, Any]:
    return {
        "target_graphs": len(plan.target),
        "drafter_graphs": len(plan.drafter),
        "largest_tokens": max(bucket.num_tokens for bucket in plan.target),
        "estimated_mib": round(estimate_mib(plan, memory, drafter), 1),
    }


def _print_graphs(figures: dict[str, dict[str, Any]], plan: GraphPlan) -> None:
    whole = list(figures.values())[-1]["estimated_mib"]
    rows = []
    for name, row in figures.items():
        mib, drafting = row["estimated_mib"], row["drafter_graphs"] or "-"
        rows.append((name, row["target_graphs"], drafting, row["largest_tokens"], f"{mib:.0f}", f"{mib / whole:.2f}x"))
    titles = ("scheme", "target graphs", "drafter graphs", "largest, tokens", "MiB (estimate)", "of the plan")
    console = flags.print_table(titles, rows)
    for title, buckets in (("target", plan.target), ("drafter", plan.drafter)):
        if buckets:
            shapes = " ".join(f"{b.num_tokens}/{b.num_reqs}/{b.max_query_len}" for b in sorted(buckets))
            console.print(f"{title}, tokens/requests/longest of each: {shapes}", markup=False, highlight=False)
    console.print(
        "MiB are estimated from the model's shape, not measured; a capture on the GPU decides.", highlight=False
    )


# --- decoupled --------------------------------------------------------------------------------------------------------


@app.command("decoupled")
def plan_decoupled_command(
    gpus: Annotated[int, typer.Option(help="Devices of the cluster.", show_default=False)],
    batch: Annotated[int, typer.Option(help="Requests of a rollout, over all devices.", show_default=False)],
    accept: Annotated[
        float | None,
        typer.Option(help="Probability that a drafted token matches; `--match` or `--ranks` say it of more choices."),
    ] = None,
    match: Annotated[
        str | None, typer.Option(help="How often the token is among 1, 2, ... choices of the drafter: `0.64,0.77`.")
    ] = None,
    ranks: Annotated[
        Path | None,
        typer.Option(help="Instead of that: a JSON list of which choice each token was, from 0, in their order."),
    ] = None,
    verify_gpus: Annotated[str, typer.Option(help="Numbers of devices that one verifier may run on.")] = "1",
    draft_ms: Annotated[
        str | None,
        typer.Option(help="One more token for b requests, n branches each, on one device: `0.8+0.002*b+0.1*n`."),
    ] = None,
    verify_ms: Annotated[
        str | None,
        typer.Option(help="A step of b requests with n drafted rows, per `--verify-gpus`: `13+0.04*b+0.03*n,...`."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help='Both from a file: `{"draft": TIME, "verify": {"4": TIME}}`; see docs/concepts/planning.md.'),
    ] = None,
    max_window: Annotated[int, typer.Option(help="Longest window, in tokens.")] = MOST_NODES,
    one_host: Annotated[bool, typer.Option("--one-host", help="Whole groups only, as on one host.")] = False,
    fan_out: Annotated[
        int | None, typer.Option(help="Choices at each place; default: as `--match` has, or 2 with `--ranks`.")
    ] = None,
    show: Annotated[int, typer.Option(help="Runners-up to print.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write all plans to this file.")] = None,
    rehearse: Annotated[bool, typer.Option("--rehearse", hidden=True, help="`--one-host`, as it was called.")] = False,
) -> None:
    """Plan drafters and verifiers by rehearsing their draft trees: tokens per second of plain, coupled and decoupled
    groups, the best first."""
    flags.in_range(gpus, "--gpus", 1, _MOST_GPUS)
    flags.in_range(batch, "--batch", 1, _MOST_REQUESTS)
    flags.in_range(max_window, "--max-window", 1, MOST_NODES)
    flags.in_range(show, "--show", 0, 1000)
    flags.check_writable(json_file, "--json")
    found, width = _matches(accept, match, ranks, fan_out)
    devices = flags.integers(verify_gpus, "--verify-gpus", 1, _MOST_GPUS)
    draft, verify, worst = _times(profile, draft_ms, verify_ms, devices)
    work = Workload(draft=draft, verify=verify, match=found, fan_out=width, max_window=max_window)
    plans = plan_devices(work, gpus, batch, one_host=one_host or rehearse)
    _print_plans(plans[: show + 1], worst)
    if json_file is not None:
        best, *others = map(asdict, plans)
        json_file.write_text(json.dumps({"estimate": True, "best": best, "others": others}, indent=2) + "\n", "utf-8")


def _matches(accept: float | None, match: str | None, ranks: Path | None, fan_out: int | None) -> tuple[Match, int]:
    """What is met of a drafter's choices, and how many it makes at each place."""
    named = [
        flag for flag, value in (("--match", match), ("--ranks", ranks), ("--accept", accept)) if value is not None
    ]
    if len(named) != 1:
        cause = f"how drafts match is given {len(named)} times{': ' + ', '.join(named) if named else ''}"
        raise ConfigError(cause, "give one of `--accept`, `--match` and `--ranks`")
    if ranks is not None:
        return _read_ranks(ranks), 2 if fan_out is None else fan_out
    among = (flags.in_range(accept, "--accept", 0.0, 1.0),) if match is None else flags.shares(match, "--match")
    width = len(among) if fan_out is None else fan_out
    if width > len(among):
        raise ConfigError(
            f"`--fan-out` is {width}, and match rates are known of {len(among)}", "give `--match` one for each"
        )
    return Match.of_shares(among, np.random.default_rng(0)), width


def _read_ranks(path: Path) -> Match:
    values = _read_json(path, "--ranks")
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 31 for value in values):
        raise ConfigError(f"`--ranks` is `{path}`, which holds no list of whole numbers", "write [0, 0, 1, 8, ...]")
    return Match(np.asarray(values, dtype=np.int32))


def _read_json(path: Path, flag: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{flag}` is `{path}`, which cannot be read as JSON: {error}", "name a JSON file") from None


def _times(
    profile: Path | None, draft_ms: str | None, verify_ms: str | None, devices: tuple[int, ...]
) -> tuple[AffineTime, dict[int, AffineTime], float]:
    """D, V by number of devices, and how far the lines are from profiled rows, at worst."""
    if profile is not None:
        if draft_ms is not None or verify_ms is not None:
            raise ConfigError("`--profile` is given beside `--draft-ms` or `--verify-ms`", "give one or the other")
        return read_profile(profile, "--profile")
    if draft_ms is None or verify_ms is None:
        raise ConfigError(
            "what drafting and verifying take is not given", "give `--draft-ms` and `--verify-ms`, or `--profile FILE`"
        )
    lines = [_line(part, "--verify-ms", "13+0.04*b+0.03*n") for part in verify_ms.split(",")]
    if len(lines) != len(devices):
        raise ConfigError(
            f"`--verify-ms` holds {len(lines)} lines for {len(devices)} verifiers",
            "give one per verifier, with commas between them: fixed + per request + per drafted row",
        )
    return _line(draft_ms, "--draft-ms", "0.8+0.002*b"), dict(zip(devices, lines, strict=True)), 0.0


def _line(text: str, flag: str, example: str) -> AffineTime:
    """`0.8+0.002*b` -> D(b) in milliseconds; `*b` and `*n` may be left out."""
    match = _LINE.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ConfigError(
            f"`{flag}` holds {text.strip()!r}, which is no line in milliseconds",
            f"write fixed + per request + per row, for example `{flag} {example}`",
        )
    fixed, per_request, per_row = map(float, match.groups(default="0"))
    return AffineTime(per_request, fixed, per_row)


def read_profile(path: Path, flag: str) -> tuple[AffineTime, dict[int, AffineTime], float]:
    """As `_times`, from `{"draft": TIME, "verify": {"4": TIME}}`.

    A TIME is `{"fixed_ms": A, "per_request_ms": B, "per_row_ms": C}`, or `{"rows": [[batch, ms], ...]}` to be fitted,
    with drafts of each request between the two where a verifier had any.

    Raises:
        ConfigError: the file cannot be read, or says something else.
    """
    body = _read_json(path, flag)
    verify = body.get("verify") if isinstance(body, dict) and set(body) == {"draft", "verify"} else None
    if not isinstance(verify, dict) or not verify:
        raise ConfigError(
            f"`{path}` does not hold the times of a drafter and of a verifier",
            'write {"draft": TIME, "verify": {"1": TIME, "2": TIME}}',
        )
    for devices in verify:
        if not devices.isdecimal() or not 1 <= int(devices) <= _MOST_GPUS:
            raise ConfigError(f"`{path}` has a verifier on {devices!r} devices", "give a whole number above 0")
    draft, *fits = (
        _time(time, path, name)
        for name, time in [("draft", body["draft"]), *((f"verify.{key}", time) for key, time in verify.items())]
    )
    lines = {int(key): line for key, (line, _) in zip(verify, fits, strict=True)}
    return draft[0], lines, max(off for _, off in (draft, *fits))


def _time(value: Any, path: Path, name: str) -> tuple[AffineTime, float]:
    try:
        if isinstance(value, Mapping) and set(value) == {"rows"}:
            return fit_line([[_number(cell) for cell in row] for row in value["rows"]])
        if isinstance(value, Mapping) and {"fixed_ms"} <= set(value) <= set(_TERMS):
            return AffineTime(**{term: _number(value.get(term, 0.0)) for term in _TERMS}), 0.0
        raise TypeError("neither the terms of a line nor rows")
    except ConfigError as error:
        raise ConfigError(f"`{name}` in `{path}`: {error.cause}", error.hint) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`{name}` in `{path}` is no time: {error}",
            'write {"fixed_ms": A, "per_request_ms": B, "per_row_ms": C} or {"rows": [[batch, ms], ...]}',
        ) from None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def fit_line(rows: list[list[float]]) -> tuple[AffineTime, float]:
    """The line with the least squared relative error and no term below 0, and its worst relative error.

    Args:
        rows: [batch, ms] or [batch, drafts, ms] of each profiled step.

    Raises:
        TypeError: rows of other lengths.
        ConfigError: the rows cannot be used, or do not tell the terms apart.
    """
    if not rows or not all(len(row) in (2, 3) for row in rows):
        raise TypeError("rows are [batch, ms] or [batch, drafts, ms]")
    batch, drafts, ms = np.asarray([(row[0], row[1] if len(row) == 3 else 0.0, row[-1]) for row in rows]).T
    if not (np.isfinite([batch, drafts, ms]).all() and (batch >= 1).all() and (ms > 0).all() and (drafts >= 0).all()):
        raise ConfigError(
            "a profile holds a batch below 1, a time that is not above 0, or drafts below 0", "leave that row out"
        )
    shares = np.stack([batch, np.ones_like(batch), batch * drafts], axis=1) / ms[:, None]
    terms = [0, 1, 2] if drafts.any() else [0, 1]
    if np.linalg.matrix_rank(shares[:, terms] * ms[:, None]) < len(terms):
        raise ConfigError(
            f"a profile of {len(rows)} rows does not tell the {len(terms)} terms of a line apart",
            "profile at least two batches, and two numbers of drafts at one of them if any are drafted",
        )
    found = np.zeros(3)
    while True:
        found[:] = 0.0
        found[terms] = np.linalg.lstsq(shares[:, terms], np.ones(len(rows)), rcond=None)[0]
        if (found >= 0.0).all():
            return AffineTime(*found.tolist()), float(np.abs(shares @ found - 1.0).max())
        terms.remove(int(np.argmin(found)))


def _print_plans(plans: tuple[Plan, ...], worst: float) -> None:
    rows = [
        (
            plan.mode.value,
            plan.draft_gpus or "-",
            plan.verify_gpus,
            plan.batch,
            plan.window or "-",
            f"{plan.tokens_per_step:.2f}",
            f"{plan.tokens_per_s:.1f}",
            f"{plan.total_tokens_per_s:.0f}",
            f"{plan.tokens_per_s / plans[0].tokens_per_s:.2f}x",
            "-" if plan.printed_per_s is None else f"{plan.printed_per_s:.1f}",
        )
        for plan in plans
    ]
    console = flags.print_table(_TITLES, rows)
    console.print("Devices, requests and window are a group's. The verifier never waits; by the paper's tau it does.")
    if worst:
        console.print(f"The lines are up to {worst:.1%} off the profiled rows.", highlight=False)
    console.print("Tokens per second are rehearsed estimates, not measured.", highlight=False)
