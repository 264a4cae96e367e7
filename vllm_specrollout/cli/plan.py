"""`specrollout plan graphs`: which CUDA graphs to capture, and what they are estimated to take.

`specrollout plan decoupled` is in decoupled.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.table import Table

from vllm_specrollout.cli import flags
from vllm_specrollout.cli.decoupled import GONE, plan_decoupled_command
from vllm_specrollout.config import MAX_NODES
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.scheduling.cudagraphs import (
    CAPTURE_SIZES,
    GraphMemory,
    GraphPlan,
    estimate_mib,
    naive_plan,
    plan_graphs,
    within_mib,
)

SHAPES = {
    "7B": GraphMemory(layers=28, hidden=3584, ffn=18944, qkv=(28 + 2 * 4) * 128),
    "0.5B": GraphMemory(layers=24, hidden=896, ffn=4864, qkv=(14 + 2 * 2) * 64),
}
"""Qwen2.5's."""
_MIB = {"MiB": 1.0, "GiB": 1024.0}


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


app.command("decoupled")(plan_decoupled_command)


@app.command("graphs")
def plan_graphs_command(
    draft: Annotated[str, typer.Option(help="Draft sizes that share the graphs, in nodes per request.")] = "8,16,32,64",
    max_num_seqs: Annotated[int, typer.Option(help="Most requests at once.")] = 256,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a captured step; larger ones run piecewise.")] = 2048,
    model: Annotated[Path | None, typer.Option(help="A model's folder, for its shape.")] = None,
    shape: Annotated[str | None, typer.Option(help="7B or 0.5B, instead of a folder; default: 7B.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Also plan for a drafting model: 7B, 0.5B or its folder.")] = None,
    limit: Annotated[str | None, typer.Option(help="Most graphs (`40`), or most memory (`600MiB`).")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the plan to this file.")] = None,
) -> None:
    """Plan CUDA graphs that several draft sizes share; estimate their memory beside that of one per size and batch."""
    sizes = flags.integers(draft, "--draft", 1, MAX_NODES)
    flags.in_range(max_num_seqs, "--max-num-seqs", 1, 1 << 16)
    flags.in_range(max_tokens, "--max-tokens", 1, 1 << 20)
    if model is not None and shape is not None:
        raise ConfigError("`--model` and `--shape` are both given", "give one: a shape stands for a model")
    flags.check_writable(json_file, "--json")
    memory = read_shape(model) if model is not None else _named(shape or "7B", "--shape")
    second = None if drafter is None else (SHAPES.get(drafter) or read_shape(Path(drafter), "--drafter"))
    most, most_mib = _limit(limit)
    plan = plan_graphs(sizes, CAPTURE_SIZES, max_num_seqs, max_tokens, limit=most, drafter=second is not None)
    if most_mib is not None:
        plan = within_mib(plan, most_mib, memory, second)
    rows = _rows(plan, sizes, max_num_seqs, max_tokens, second is not None)
    figures = {name: _figures(part, memory, second) for name, part in rows.items()}
    _print(figures, plan)
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


def _named(shape: str, flag: str) -> GraphMemory:
    return SHAPES[flags.choice(shape, flag, tuple(SHAPES))]


def _limit(text: str | None) -> tuple[int | None, float | None]:
    """(most graphs, most MiB); at most one of them is set."""
    if text is None:
        return None, None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MiB|GiB)?", text.strip())
    if match is None or (match[2] is None and "." in match[1]) or float(match[1]) == 0:
        raise ConfigError(f"`--limit` is {text!r}, neither a number of graphs nor a size", "write `40` or `600MiB`")
    return (int(match[1]), None) if match[2] is None else (None, float(match[1]) * _MIB[match[2]])


def _rows(
    plan: GraphPlan, sizes: tuple[int, ...], max_num_seqs: int, max_tokens: int, drafter: bool
) -> dict[str, GraphPlan]:
    """The plan after what it replaces, and beside the same scheme for the one draft size that needs least."""
    ones = [plan_graphs([size], CAPTURE_SIZES, max_num_seqs, max_tokens, drafter=drafter) for size in sizes]
    least = min(range(len(ones)), key=lambda i: (ones[i].num_graphs, ones[i].target[-1].num_tokens))
    return {
        "naive, every pair": naive_plan(sizes, CAPTURE_SIZES, max_num_seqs, drafter=drafter),
        f"naive, to {max_tokens} tokens": naive_plan(sizes, CAPTURE_SIZES, max_num_seqs, max_tokens, drafter=drafter),
        f"shared, draft {sizes[least]} alone": ones[least],
        "shared (the plan)": plan,
    }


def _figures(plan: GraphPlan, memory: GraphMemory, drafter: GraphMemory | None) -> dict[str, Any]:
    return {
        "target_graphs": len(plan.target),
        "drafter_graphs": len(plan.drafter),
        "largest_tokens": plan.target[-1].num_tokens,
        "estimated_mib": round(estimate_mib(plan, memory, drafter), 1),
    }


def _print(figures: dict[str, dict[str, Any]], plan: GraphPlan) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table(pad_edge=False)
    table.add_column("scheme", no_wrap=True)
    for title in ("target graphs", "drafter graphs", "largest, tokens", "MiB (estimate)", "of the plan"):
        table.add_column(title, justify="right")
    whole = list(figures.values())[-1]["estimated_mib"]
    for name, row in figures.items():
        numbers = (row["target_graphs"], row["drafter_graphs"] or "-", row["largest_tokens"])
        mib = row["estimated_mib"]
        table.add_row(name, *map(str, numbers), f"{mib:.0f}", f"{mib / whole:.2f}x")
    console.print(table)
    for title, buckets in (("target", plan.target), ("drafter", plan.drafter)):
        if buckets:
            counts = " ".join(str(bucket.num_tokens) for bucket in buckets)
            console.print(f"{title}, tokens of each graph: {counts}", markup=False, highlight=False)
    console.print(
        "MiB are estimated from the model's shape, not measured; a capture on the GPU decides.", highlight=False
    )
