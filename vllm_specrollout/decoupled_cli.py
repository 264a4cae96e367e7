"""`specrollout plan decoupled`: how many devices draft, how many verify, and how far ahead."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_specrollout import cli_flags as flags
from vllm_specrollout.decoupled.planner import MAX_WINDOW, TAUS, Plan, Ranking, Workload, choose_placement, plan_cluster
from vllm_specrollout.decoupled.rates import Exits
from vllm_specrollout.decoupled.times import TimeFit
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.time_flags import draft_time, read_profile, verify_times

_MOST_GPUS, _MOST_REQUESTS = 1 << 16, 1 << 24


def plan_decoupled_command(
    gpus: Annotated[int, typer.Option(help="Devices of the cluster.", show_default=False)],
    batch: Annotated[int, typer.Option(help="Requests of a rollout, over all devices.", show_default=False)],
    accept: Annotated[float, typer.Option(help="Probability that a drafted token matches.", show_default=False)],
    verify_gpus: Annotated[str, typer.Option(help="Numbers of devices that one verifier may run on.")] = "1",
    draft_ms: Annotated[
        str | None, typer.Option(help="One more token for b requests, on one device: `0.8+0.002*b`.")
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
    show: Annotated[int, typer.Option(help="Runners-up to print.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write all plans to this file.")] = None,
) -> None:
    """Plan drafters and verifiers: tokens per second of plain, coupled and decoupled groups, the best first."""
    flags.in_range(gpus, "--gpus", 1, _MOST_GPUS)
    flags.in_range(batch, "--batch", 1, _MOST_REQUESTS)
    flags.in_range(accept, "--accept", 0.0, 1.0)
    flags.choice(tau, "--tau", tuple(TAUS))
    flags.in_range(exits, "--exits", 0.0, 1.0)
    flags.in_range(exit_width, "--exit-width", 0, 16)
    flags.in_range(exit_cost, "--exit-cost", 1.0, 100.0)
    flags.in_range(max_window, "--max-window", 1, MAX_WINDOW)
    flags.in_range(show, "--show", 0, 1000)
    flags.check_writable(json_file, "--json")
    draft, verify = _times(profile, draft_ms, verify_ms, verify_gpus)
    work = Workload(
        draft=draft.time,
        verify={devices: fit.time for devices, fit in verify.items()},
        match_rate=accept,
        exits=Exits(exits, exit_width, exit_cost) if exits else Exits(),
        tau=tau,
        max_window=max_window,
    )
    ranking = (choose_placement if one_host else plan_cluster)(work, gpus, batch)
    _print(ranking, show, tau, [draft, *verify.values()])
    if json_file is not None:
        body = {"estimate": True, "tau": tau, "best": asdict(ranking.best), "others": list(map(asdict, ranking.others))}
        json_file.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def _times(
    profile: Path | None, draft_ms: str | None, verify_ms: str | None, verify_gpus: str
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
        TimeFit(draft_time(draft_ms, "--draft-ms"), 0.0, 0.0),
        {number: TimeFit(time, 0.0, 0.0) for number, time in verify.items()},
    )


def _print(ranking: Ranking, show: int, tau: str, fits: list[TimeFit]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table(pad_edge=False)
    table.add_column("plan", no_wrap=True)
    for title in ("drafting", "verifying", "window", "requests", "tokens/s each", "tokens/s in all", "of the best"):
        table.add_column(title, justify="right")
    for plan in (ranking.best, *ranking.others[:show]):
        table.add_row(*_row(plan, ranking.best))
    console.print(table)
    kind = {"exact": "never waits", "waiting": "waits for windows", "paper": "waits, with the paper's tau"}[tau]
    console.print(f"Devices, window and requests are a group's. The verifier {kind}.", highlight=False)
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
