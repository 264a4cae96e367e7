"""`specrollout plan`: which model drafts, on how many devices, and how far ahead, by what engines have measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_specrollout.cli import flags
from vllm_specrollout.cluster.planner import Plan, plan_devices
from vllm_specrollout.cluster.profiles import DrafterProfile, kept, of_model, read
from vllm_specrollout.cluster.rates import Mode
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import MOST_NODES

_MOST_GPUS, _MOST_REQUESTS = 1 << 16, 1 << 24
_MOST_COMMANDS, _PORT = 8, 8000
_TITLES = (
    *("plan", "drafter", "drafting", "verifying", "requests", "window"),
    *("groups", "tokens/step", "tokens/s each", "in all", "of the best"),
)


def plan_command(
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
    """Plan drafters and verifiers: tokens per second of groups that decode plainly, draft by what they have, or with a
    model in their steps or beside them; the best first. Needs neither vLLM nor a GPU."""
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
            for plan in plan_devices(known, gpus, batch, max_window=max_window, one_host=one_host)
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
        _print_commands(plan, known, apply)


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
    if plan.mode in (Mode.PLAIN, Mode.OWN):
        # where nothing is known of the engine's own drafts, that its model does not pay says nothing of them
        return {"placement": "coupled"} | ({"budget": "off"} if plan.mode is Mode.PLAIN and profile.own else {})
    model = profile.drafter or "DRAFTER"
    # a comb of so many levels, or windows of so many tokens
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": plan.window}
    if plan.mode is Mode.COUPLED:
        return {"placement": "coupled", "speculative_config": drafts}
    kind = profile.device.partition(":")[0] or "cuda"
    places = [f"{kind}:{plan.verify_gpus + i}" for i in range(plan.draft_gpus)]
    more = [{"model": model, "devices": [place]} for place in places[1:]]
    own = {"window": plan.window} | ({"drafters": more} if more else {})
    return {"placement": "decoupled", "speculative_config": drafts, "devices": places[:1], "decoupled": own}


def _print_commands(plan: Plan, profile: DrafterProfile, file: Path) -> None:
    """What starts all groups: the file is one group's, and each group has devices of its own."""
    ranks = f" --tensor-parallel-size {plan.verify_gpus}" if plan.verify_gpus > 1 else ""
    command = f"vllm serve {profile.target or 'MODEL'}{ranks} --spec-rollout {file}"
    size = plan.draft_gpus + plan.verify_gpus
    if plan.groups > 1:
        typer.echo(
            f"The file is wanted {plan.groups} times: for {plan.groups} engines, on {size} devices of its own each."
        )
    for group in range(min(plan.groups, _MOST_COMMANDS)):
        devices = ",".join(str(group * size + i) for i in range(size))
        place = f"CUDA_VISIBLE_DEVICES={devices} " if profile.device.startswith("cuda") and plan.groups > 1 else ""
        typer.echo(f"{place}{command}{f' --port {_PORT + group}' if plan.groups > 1 else ''}")
    if plan.groups > _MOST_COMMANDS:
        typer.echo(f"... and so on with the devices of other hosts, {plan.groups} engines in all")


def _print_plans(plans: Sequence[tuple[Plan, DrafterProfile]]) -> None:
    rows = [
        (
            plan.mode.value,
            "-" if plan.mode in (Mode.PLAIN, Mode.OWN) else Path(known.drafter).name or "-",
            plan.draft_gpus or "-",
            plan.verify_gpus,
            plan.batch,
            plan.window or "-",
            plan.groups,
            f"{plan.tokens_per_step:.2f}",
            f"{plan.tokens_per_s:.1f}",
            f"{plan.total_tokens_per_s:.0f}",
            f"{plan.tokens_per_s / plans[0][0].tokens_per_s:.2f}x",
        )
        for plan, known in plans
    ]
    console = flags.print_table(_TITLES, rows)
    console.print("Devices, requests and window are a group's. Tokens per second are estimates.", highlight=False)
