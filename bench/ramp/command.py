"""`specrollout bench ramp`: flags in; a table per pattern and JSON out."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_specrollout.config import BUDGETS
from vllm_specrollout.errors import ConfigError

from ..common import flags
from ..common.display import Display
from ..common.models import CACHE, check_length
from ..common.report import check_writable, make_report
from ..common.tuned import Engines
from ..rollout.plan import DRAFTERS
from ..sweep.command import each_probability, find_model
from .measure import NUM_LONG, NUM_SHORT, run_ramps
from .plan import PATTERNS, Plan, RampRow, summary

_DEFAULT = Plan()
_TAIL_TOKENS = 1024


def bench_ramp(
    size: Annotated[
        str | None, typer.Option(help="Random weights of this size (default: 150M); or the policy's.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A model's folder, instead of random weights.")] = None,
    pattern: Annotated[str, typer.Option(help="Load patterns.")] = ",".join(_DEFAULT.patterns),
    budget: Annotated[str, typer.Option(help="Presets beside `auto`.")] = ",".join(_DEFAULT.budgets),
    tail: Annotated[
        bool, typer.Option("--tail", help="Long-tail rollout of the project's policy, with and without length weight.")
    ] = False,
    requests: Annotated[int, typer.Option(help="Requests of a pattern.")] = _DEFAULT.requests,
    tokens: Annotated[int | None, typer.Option(help="Of the longest answer; default: 96, with --tail 1024.")] = None,
    accuracy: Annotated[str, typer.Option(help="Probability that a draft token is right.")] = str(_DEFAULT.accuracy),
    max_draft_tokens: Annotated[int, typer.Option(help="Most draft tokens per step.")] = _DEFAULT.max_draft_tokens,
    rounds: Annotated[int, typer.Option(help="Timed rounds; the medians are reported.")] = _DEFAULT.rounds,
    batch: Annotated[int, typer.Option(help="Requests at once, with --tail.")] = _DEFAULT.places,
    seed: Annotated[int, typer.Option(help="Of the requests' noise, and of the tail's problems.")] = _DEFAULT.seed,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = _DEFAULT.dtype,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")] = None,
    kv_gib: Annotated[int, typer.Option(help="GiB of KV cache of each engine.")] = 1,
    cache: Annotated[Path, typer.Option(help="Where models are kept.", show_default=False)] = CACHE,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.")] = False,
) -> None:
    """Run loads that change on the way under `auto` and every other preset; or, with --tail, a long-tail rollout."""
    if model is not None and size is not None:
        raise ConfigError("`--size` and `--model` are both given", "give one: a size is of random weights")
    plan = Plan(
        patterns=("tail",) if tail else flags.names(pattern, "--pattern", PATTERNS),
        budgets=flags.names(budget, "--budget", BUDGETS),
        requests=NUM_SHORT + NUM_LONG if tail else requests,
        tokens=tokens or (_TAIL_TOKENS if tail else _DEFAULT.tokens),
        accuracy=each_probability(accuracy)[0],
        max_draft_tokens=max_draft_tokens,
        rounds=rounds,
        seed=seed,
        dtype=dtype,
        is_tail=tail,
        places=batch,
    )
    check_writable(json, "--json")
    with Display() as display, tempfile.TemporaryDirectory() as scratch:
        folder, title = find_model(model, size, dtype, cache, display, is_policy=tail)
        check_length(folder, plan.max_model_len())
        advance = display.steps(len(plan.patterns))
        advance("starting the engines", 0)
        config = plan.spec_rollout(DRAFTERS if tail else ("oracle",))
        arguments = plan.engine_arguments(folder, plan.places if tail else plan.requests)
        with Engines(arguments, config, Path(scratch), kv_gib=kv_gib, is_verbose=verbose) as engines:
            rows = run_ramps(plan, engines, advance, lambda own: _print_pattern(own, display.out))
    report = make_report("ramp", {"model": title, **plan.as_dict()}, rows, {"summary": summary(rows)})
    if json is not None:
        json.write_text(report.as_json(), encoding="utf-8")
        display.out.print(f"wrote {json}", markup=False)


def _print_pattern(rows: Sequence[RampRow], out: Console) -> None:
    auto = rows[0]
    out.print(
        f"{auto.pattern}: {auto.num_requests} requests, {auto.batch} at once, seed {auto.seed}, "
        f"p75/max {auto.length_ratio:.2f}",
        markup=False,
        highlight=False,
    )
    for row in rows:
        time = "not comparable" if row.speedup is None else f"{row.makespan_s:7.2f} s  {row.speedup:.2f}x stock"
        counts = f"on {row.steps_on}, off {row.steps_off} steps, {row.switches} switches ({row.mind_changes} by choice)"
        out.print(f"  {row.name:44s} {time}  {counts}", markup=False, highlight=False)
        if not row.identical:
            out.print(f"    {row.difference}", markup=False, highlight=False)
    if auto.auto_to_best is not None:
        out.print(f"  auto / {auto.best}: {auto.auto_to_best:.3f}", markup=False, highlight=False)
