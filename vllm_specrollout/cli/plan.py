"""`specrollout plan`: what to set up before an engine starts.

`plan graphs`: which CUDA graphs to capture, and what they are estimated to take. `plan decoupled`: which model drafts,
on how many devices, and how far ahead, by rehearsal with what engines have measured.
"""

from __future__ import annotations

import json
import re
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
    out: Annotated[Path | None, typer.Option(help="Also write the plan to this file.")] = None,
) -> None:
    """Plan CUDA graphs that several draft sizes share; estimate their memory beside that of one per size and batch."""
    sizes = flags.integers(draft, "--draft", 1, MAX_NODES)
    flags.in_range(max_num_seqs, "--max-num-seqs", 1, 1 << 16)
    flags.in_range(max_tokens, "--max-tokens", 1, 1 << 20)
    if model is not None and shape is not None:
        raise ConfigError("`--model` and `--shape` are both given", "give one: a shape stands for a model")
    flags.check_writable(out, "--out")
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
    if out is not None:
        body = {"estimate": True, "schemes": figures, "plan": asdict(plan)}
        out.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


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
