"""`specrollout plan`: what to set up before an engine starts.

`plan decoupled`: which model drafts, on how many devices, and how far ahead, by rehearsal with what engines have
measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from vllm_specrollout.cli import flags
from vllm_specrollout.cluster.planner import Plan, plan_devices, workload
from vllm_specrollout.cluster.profiles import DrafterProfile, kept, of_model, read
from vllm_specrollout.cluster.rates import Mode
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import MOST_NODES

_MOST_GPUS, _MOST_REQUESTS = 1 << 16, 1 << 24
_TITLES = (
    *("plan", "drafter", "drafting", "verifying", "requests", "window"),
    *("tokens/step", "tokens/s each", "in all", "of the best", "by paper"),
)


class _Plans(typer.core.TyperGroup):
    """`plan --gpus 256 ...` is `plan decoupled --gpus 256 ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            args = ["decoupled", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    help="What to set up before an engine starts.\n\n`plan OPTIONS` means `plan decoupled OPTIONS`.",
    cls=_Plans,
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _plan() -> None:
    """What to set up before an engine starts. Needs neither vLLM nor a GPU."""


@app.command("decoupled")
def plan_decoupled_command(
    gpus: Annotated[int, typer.Option(help="Devices of the cluster.", show_default=False)],
    batch: Annotated[int, typer.Option(help="Requests of a rollout, over all devices.", show_default=False)],
    model: Annotated[
        str | None, typer.Option(help="The target's folder or name: plan with what its engines measured of drafters.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="Of its drafters this one alone.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="In place of both, a file that you wrote; see docs/concepts/planning.md.")
    ] = None,
    max_window: Annotated[int, typer.Option(help="Longest window, in tokens.")] = MOST_NODES,
    one_host: Annotated[bool, typer.Option("--one-host", help="Whole groups only, as on one host.")] = False,
    show: Annotated[int, typer.Option(help="Runners-up to print.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Also write all plans to this file.")] = None,
    apply: Annotated[
        Path | None, typer.Option(help="Write the best plan to this file, for `--spec-rollout FILE`.")
    ] = None,
) -> None:
    """Plan drafters and verifiers by rehearsing their draft trees: tokens per second of plain, coupled and decoupled
    groups, the best first."""
    flags.in_range(gpus, "--gpus", 1, _MOST_GPUS)
    flags.in_range(batch, "--batch", 1, _MOST_REQUESTS)
    flags.in_range(max_window, "--max-window", 1, MOST_NODES)
    flags.in_range(show, "--show", 0, 1000)
    flags.check_writable(out, "--out")
    flags.check_writable(apply, "--apply")
    plans = sorted(
        (
            (plan, known)
            for known in _profiles(model, drafter, profile)
            for plan in plan_devices(workload(known, max_window), gpus, batch, one_host=one_host)
        ),
        key=lambda pair: -pair[0].tokens_per_s,
    )
    _print_plans(plans[: show + 1])
    if out is not None:
        best, *others = [{"drafter": known.drafter, **asdict(plan)} for plan, known in plans]
        out.write_text(json.dumps({"estimate": True, "best": best, "others": others}, indent=2) + "\n", "utf-8")
    if apply is not None:
        plan, known = plans[0]
        apply.write_text(json.dumps(configuration(plan, known), indent=2) + "\n", "utf-8")
        ranks = f" --tensor-parallel-size {plan.verify_gpus}" if plan.verify_gpus > 1 else ""
        typer.echo(f"vllm serve {known.target or 'MODEL'}{ranks} --spec-rollout {apply}")


def _profiles(model: str | None, drafter: str | None, file: Path | None) -> list[DrafterProfile]:
    """What is planned with.

    Raises:
        ConfigError: nothing is known, or it is said in two ways.
    """
    if (model is None) is (file is None):
        raise ConfigError(
            f"`--model` and `--profile` are {'both given' if model else 'not given'}",
            "give one: a model whose engines have measured drafters, or a file that says the same",
        )
    if file is not None:
        return [read(file, "--profile")]
    every = kept()
    found = [one for one in of_model(every, str(model)) if drafter in (None, one.drafter)]
    if not found:
        known = sorted({f"{one.target} with {one.drafter}" for one in every})
        raise ConfigError(
            f"nothing is known of {'`' + drafter + '`' if drafter else 'drafters'} beside `{model}`",
            f"run an engine with a drafter on devices of its own; known are: {', '.join(known) or 'none'}",
        )
    return found


def configuration(plan: Plan, profile: DrafterProfile) -> dict[str, Any]:
    """What `--spec-rollout` takes, for one group of a plan."""
    if plan.mode is Mode.PLAIN:
        return {"placement": "coupled"}
    model = profile.drafter or "DRAFTER"
    # a comb of so many levels, or windows of so many tokens
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": plan.window}
    if plan.mode is Mode.COUPLED:
        return {"placement": "coupled", "speculative_config": drafts}
    kind = profile.device.partition(":")[0] or "cuda"
    places = [f"{kind}:{plan.verify_gpus + i}" for i in range(plan.draft_gpus)]
    more = [{"model": model, "devices": [place]} for place in places[1:]]
    own = {"window": plan.window, "fan_out": min(profile.fan_out, 8)} | ({"drafters": more} if more else {})
    return {"placement": "decoupled", "speculative_config": drafts, "devices": places[:1], "decoupled": own}


def _print_plans(plans: Sequence[tuple[Plan, DrafterProfile]]) -> None:
    rows = [
        (
            plan.mode.value,
            "-" if plan.mode is Mode.PLAIN else Path(known.drafter).name or "-",
            plan.draft_gpus or "-",
            plan.verify_gpus,
            plan.batch,
            plan.window or "-",
            f"{plan.tokens_per_step:.2f}",
            f"{plan.tokens_per_s:.1f}",
            f"{plan.total_tokens_per_s:.0f}",
            f"{plan.tokens_per_s / plans[0][0].tokens_per_s:.2f}x",
            "-" if plan.printed_per_s is None else f"{plan.printed_per_s:.1f}",
        )
        for plan, known in plans
    ]
    console = flags.print_table(_TITLES, rows)
    console.print("Devices, requests and window are a group's. The verifier never waits; by the paper's tau it does.")
    console.print("Tokens per second are rehearsed estimates, not measured.", highlight=False)
