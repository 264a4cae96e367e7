"""`specrollout bench engine`: flags in, table and JSON out."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from vllm_specrollout.errors import ConfigError

from ..common.display import Display
from ..common.models import CACHE, check_length, check_model, random_model_of
from ..common.report import check_writable, make_report, print_rows
from .measure import Bench, num_units
from .plan import Plan

_DEFAULT = Plan()


def _join(values: tuple[int | float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)


def bench_engine(
    size: Annotated[str | None, typer.Option(help="Random weights of this size: 1M, 3M, 30M, 150M or 400M.")] = None,
    model: Annotated[Path | None, typer.Option(help="A model's folder, instead of random weights.")] = None,
    batch: Annotated[str, typer.Option(help="Requests at once.")] = _join(_DEFAULT.batches),
    draft: Annotated[str, typer.Option(help="Draft tokens per request and step.")] = _join(_DEFAULT.drafts),
    tokens: Annotated[int, typer.Option(help="Tokens generated per request.")] = _DEFAULT.tokens,
    accuracy: Annotated[
        str, typer.Option(help="Probability that the draft of rank 1, 2, ... is right; several ranks make trees.")
    ] = _join(_DEFAULT.accuracy),
    shape: Annotated[str, typer.Option(help="tree, chain (first rank only), or both.")] = _DEFAULT.shape,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = _DEFAULT.dtype,
    repeats: Annotated[int, typer.Option(help="Timed rounds; the medians are reported.")] = _DEFAULT.repeats,
    off_path: Annotated[
        bool, typer.Option("--off-path", help="Measure what the plugin costs while it drafts nothing.")
    ] = False,
    eager: Annotated[bool, typer.Option("--eager/--compiled", help="Without or with torch.compile, in both.")] = True,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first request's noise; the others' follow.")] = _DEFAULT.seed,
    kv_gib: Annotated[int, typer.Option(help="GiB of KV cache of each engine.")] = 1,
    cache: Annotated[Path, typer.Option(help="Where random models are kept.", show_default=False)] = CACHE,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.")] = False,
) -> None:
    """Decode with drafts of known accuracy (the oracle drafter) and without: speed-up, ideal, efficiency."""
    if size is not None and model is not None:
        raise ConfigError("`--size` and `--model` are both given", "give one: a size is of random weights")
    plan = Plan.from_flags(
        batch,
        draft,
        accuracy,
        tokens=tokens,
        shape=shape,
        dtype=dtype,
        repeats=repeats,
        is_off_path=off_path,
        is_eager=eager,
        seed=seed,
    )
    check_writable(json, "--json")
    with Display() as display, tempfile.TemporaryDirectory() as scratch:
        folder = check_model(model, "--model") if model is not None else None
        title = folder.name if folder is not None else f"random weights, {size or '150M'}"
        if folder is None:
            folder = random_model_of(size or "150M", dtype, cache, display.counter("making the model"))
        check_length(folder, plan.max_model_len())
        advance = display.steps(num_units(plan))
        with Bench(plan, folder, Path(scratch), advance, kv_gib=kv_gib, is_verbose=verbose) as bench:
            rows = bench.run()
    report = make_report("engine", {"model": title, **plan.as_dict()}, rows)
    drafts = "no drafts" if off_path else f"oracle drafter, accuracy {accuracy}"
    display.out.print(f"{title}, {dtype}, {tokens} tokens per request, {drafts}; {report.host['cpu']}", markup=False)
    print_rows(rows, display.out)
    if json is not None:
        json.write_text(report.as_json(), encoding="utf-8")
        display.out.print(f"wrote {json}", markup=False)
    if not all(row.identical for row in rows):
        raise typer.Exit(1)
