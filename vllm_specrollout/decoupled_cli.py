"""`specrollout plan decoupled`: how many devices draft, how many verify, and how far ahead.

What belongs here: flags, and the tables. Plans by rehearsal, with `--rehearse`, are of one host.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from vllm_specrollout.cli import flags
from vllm_specrollout.decoupled.planner import MAX_WINDOW, TAUS, Plan, Ranking, Workload, choose_placement, plan_cluster
from vllm_specrollout.decoupled.rates import Exits
from vllm_specrollout.decoupled.rehearsal import Match
from vllm_specrollout.decoupled.rehearsed_plans import RehearsedPlan, Trees, rehearse_placements
from vllm_specrollout.decoupled.times import TimeFit
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.time_flags import draft_time, read_profile, verify_times

_MOST_GPUS, _MOST_REQUESTS = 1 << 16, 1 << 24


def plan_decoupled_command(
    gpus: Annotated[int, typer.Option(help="Devices of the cluster.", show_default=False)],
    batch: Annotated[int, typer.Option(help="Requests of a rollout, over all devices.", show_default=False)],
    accept: Annotated[
        float | None,
        typer.Option(help="Probability that a drafted token matches; needed unless `--match` or `--ranks` says it."),
    ] = None,
    verify_gpus: Annotated[str, typer.Option(help="Numbers of devices that one verifier may run on.")] = "1",
    draft_ms: Annotated[
        str | None,
        typer.Option(
            help="One more token for b requests, on one device: `0.8+0.002*b`; with `--rehearse` also `+0.1*n`, of n"
            " nodes looked at."
        ),
    ] = None,
    verify_ms: Annotated[
        str | None,
        typer.Option(help="A step of b requests with n drafted rows, per `--verify-gpus`: `13+0.04*b+0.03*n,...`."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help='Both from a file: `{"draft": TIME, "verify": {"4": TIME}}`; see docs/concepts/decoupled.md.'
        ),
    ] = None,
    tau: Annotated[
        str, typer.Option(help="Model of decoupled speculation: exact (the verifier never waits), waiting, or paper.")
    ] = "exact",
    exits: Annotated[float, typer.Option(help="Probability that a miss was foreseen and drafted behind.")] = 0.0,
    exit_width: Annotated[int, typer.Option(help="Alternatives at each place, for that.")] = 1,
    exit_cost: Annotated[float, typer.Option(help="Time of a window with exits, over that without.")] = 1.0,
    max_window: Annotated[int, typer.Option(help="Longest window, in tokens.")] = MAX_WINDOW,
    one_host: Annotated[bool, typer.Option("--one-host", help="Whole groups only, as on one host.")] = False,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Rank the plans of one host by rehearsing our draft trees; takes seconds."),
    ] = False,
    match: Annotated[
        str | None,
        typer.Option(help="For `--rehearse`: how often the token is among 1, 2, ... choices, as `0.64,0.77`."),
    ] = None,
    ranks: Annotated[
        Path | None,
        typer.Option(help="Instead of that: a JSON list of which choice each token was, from 0, in their order."),
    ] = None,
    fan_out: Annotated[
        int | None, typer.Option(help="For `--rehearse`: choices at each place; default: as `--match` has, or 2.")
    ] = None,
    most_nodes: Annotated[
        int, typer.Option(help="For `--rehearse`: nodes of a stream that are looked behind, at most.")
    ] = 16,
    show: Annotated[int, typer.Option(help="Runners-up to print.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write all plans to this file.")] = None,
) -> None:
    """Plan drafters and verifiers: tokens per second of plain, coupled and decoupled groups, the best first."""
    flags.in_range(gpus, "--gpus", 1, _MOST_GPUS)
    flags.in_range(batch, "--batch", 1, _MOST_REQUESTS)
    trees = _trees(rehearse, accept, match, ranks, fan_out, most_nodes)
    if trees is not None and accept is None:
        accept = trees.match.among(1)
    if accept is None:
        raise ConfigError("it is not given how often a drafted token matches", "give `--accept`")
    flags.in_range(accept, "--accept", 0.0, 1.0)
    flags.choice(tau, "--tau", tuple(TAUS))
    flags.in_range(exits, "--exits", 0.0, 1.0)
    flags.in_range(exit_width, "--exit-width", 0, 16)
    flags.in_range(exit_cost, "--exit-cost", 1.0, 100.0)
    flags.in_range(max_window, "--max-window", 1, MAX_WINDOW)
    flags.in_range(show, "--show", 0, 1000)
    flags.check_writable(json_file, "--json")
    draft, verify = _times(profile, draft_ms, verify_ms, verify_gpus, has_rows=rehearse)
    if trees is not None and not exits:
        exits, exit_width = _exits(trees), trees.fan_out - 1
    work = Workload(
        draft=draft.time,
        verify={devices: fit.time for devices, fit in verify.items()},
        match_rate=accept,
        exits=Exits(exits, exit_width, exit_cost) if exits else Exits(),
        tau=tau,
        max_window=max_window,
    )
    fits = [draft, *verify.values()]
    plans: list[dict[str, Any]]
    if trees is not None:
        found = rehearse_placements(work, gpus, batch, trees)
        _print_rehearsed(found, show, fits)
        plans = [{**asdict(one.plan), **_figures(one)} for one in found]
    else:
        ranking = (choose_placement if one_host else plan_cluster)(work, gpus, batch)
        _print(ranking, show, tau, fits)
        plans = [asdict(plan) for plan in (ranking.best, *ranking.others)]
    if json_file is not None:
        body = {"estimate": True, "tau": tau, "rehearsed": rehearse, "best": plans[0], "others": plans[1:]}
        json_file.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def _trees(
    rehearse: bool,
    accept: float | None,
    match: str | None,
    ranks: Path | None,
    fan_out: int | None,
    most_nodes: int,
) -> Trees | None:
    """What is rehearsed; None: nothing is."""
    given = {"--match": match, "--ranks": ranks, "--accept": accept}
    named = [flag for flag, value in given.items() if value is not None]
    if not rehearse:
        for flag, value in (("--match", match), ("--ranks", ranks), ("--fan-out", fan_out)):
            if value is not None:
                raise ConfigError(f"`{flag}` is given, and nothing is rehearsed", "add `--rehearse`, or leave it out")
        return None
    if len(named) != 1:
        cause = f"how drafts match is given {len(named)} times{': ' + ', '.join(named) if named else ''}"
        raise ConfigError(cause, "with `--rehearse`, give one of `--match`, `--ranks` and `--accept`")
    if ranks is not None:
        return Trees(_read_ranks(ranks), 2 if fan_out is None else fan_out, most_nodes)
    among = (flags.in_range(accept, "--accept", 0.0, 1.0),) if match is None else flags.shares(match, "--match")
    width = len(among) if fan_out is None else fan_out
    if width > len(among):
        raise ConfigError(
            f"`--fan-out` is {width}, and match rates are known of {len(among)}", "give `--match` one for each"
        )
    return Trees(Match.of_shares(among, np.random.default_rng(0)), width, most_nodes)


def _read_ranks(path: Path) -> Match:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`--ranks` is `{path}`, which cannot be read as JSON: {error}", "name a JSON file") from None
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 31 for value in values):
        raise ConfigError(f"`--ranks` is `{path}`, which holds no list of whole numbers", "write [0, 0, 1, 8, ...]")
    return Match(np.asarray(values, dtype=np.int32))


def _exits(trees: Trees) -> float:
    """Of all misses, the share that is one of the choices beside the first."""
    first = trees.match.among(1)
    return (trees.match.among(trees.fan_out) - first) / (1.0 - first) if first < 1.0 else 0.0


def _figures(one: RehearsedPlan) -> dict[str, dict[str, float]]:
    own = {"window": one.window, "tokens_per_s": one.rehearsed_per_s, "tokens_per_step": one.tokens_per_step}
    return {"rehearsed": own}


def _times(
    profile: Path | None, draft_ms: str | None, verify_ms: str | None, verify_gpus: str, *, has_rows: bool
) -> tuple[TimeFit, dict[int, TimeFit]]:
    devices = flags.integers(verify_gpus, "--verify-gpus", 1, _MOST_GPUS)
    if profile is not None:
        if draft_ms is not None or verify_ms is not None:
            raise ConfigError("`--profile` is given beside `--draft-ms` or `--verify-ms`", "give one or the other")
        return read_profile(profile, "--profile")
    if draft_ms is None or verify_ms is None:
        raise ConfigError(
            "what drafting and verifying take is not given", "give `--draft-ms` and `--verify-ms`, or `--profile FILE`"
        )
    verify = verify_times(verify_ms, "--verify-ms", devices)
    return (
        TimeFit(draft_time(draft_ms, "--draft-ms", has_rows=has_rows), 0.0, 0.0),
        {number: TimeFit(time, 0.0, 0.0) for number, time in verify.items()},
    )


def _print(ranking: Ranking, show: int, tau: str, fits: list[TimeFit]) -> None:
    titles = ("drafting", "verifying", "window", "requests", "tokens/s each", "tokens/s in all", "of the best")
    plans = (ranking.best, *ranking.others[:show])
    console = _print_table(titles, [_row(plan, ranking.best) for plan in plans])
    kind = {"exact": "never waits", "waiting": "waits for windows", "paper": "waits, with the paper's tau"}[tau]
    console.print(f"Devices, window and requests are a group's. The verifier {kind}.", highlight=False)
    _print_doubts(console, fits)


def _print_rehearsed(found: tuple[RehearsedPlan, ...], show: int, fits: list[TimeFit]) -> None:
    titles = ("drafting", "verifying", "requests", "window", "tokens/step", "tokens/s", "of the best", "by formula")
    best, rows = found[0].rehearsed_per_s, []
    for one in found[: show + 1]:
        _, drafting, verifying, window, requests, *_ = _row(one.plan, one.plan)
        formula = f"{one.plan.tokens_per_s:.1f}" + ("" if window == "-" else f" (window {window})")
        figures = (f"{one.tokens_per_step:.2f}", f"{one.rehearsed_per_s:.1f}", f"{one.rehearsed_per_s / best:.2f}x")
        rows.append([one.plan.mode.value, drafting, verifying, requests, str(one.window or "-"), *figures, formula])
    console = _print_table(titles, rows)
    console.print("Tokens per second are of each request: of trees as rehearsed, and of windows by formula.")
    _print_doubts(console, fits)


def _print_table(titles: tuple[str, ...], rows: list[list[str]]) -> Console:
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table(pad_edge=False)
    table.add_column("plan", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return console


def _print_doubts(console: Console, fits: list[TimeFit]) -> None:
    worst = max(fit.worst_error for fit in fits)
    if worst:
        console.print(f"The lines are up to {worst:.1%} off the profiled rows.", highlight=False)
    console.print("Tokens per second are estimates, not measured.", highlight=False)


def _row(plan: Plan, best: Plan) -> list[str]:
    return [
        plan.mode.value + (", exits" if plan.has_exits else ""),
        str(plan.draft_gpus or "-"),
        str(plan.verify_gpus),
        str(plan.window or "-"),
        str(plan.batch),
        f"{plan.tokens_per_s:.1f}",
        f"{plan.total_tokens_per_s:.0f}",
        f"{plan.tokens_per_s / best.tokens_per_s:.2f}x",
    ]
