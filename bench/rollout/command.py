"""`specrollout bench rollout`: flags in; table, rewards, answers, picture and JSON out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_specrollout.errors import ConfigError

from ..common import flags
from ..common.display import Display
from ..common.models import CACHE, CHECKPOINT, check_length, check_model, inflated_policy
from ..common.report import check_writable, make_report, print_rows
from .explain import print_explained
from .measure import NUM_FIXED_UNITS, Outcome, Sample, roll_out
from .plan import DRAFTERS, Plan
from .plot import check_matplotlib, plot

_DEFAULT = Plan()


def bench_rollout(
    model: Annotated[
        Path,
        typer.Option(help="The policy's folder; default: the one that comes with the project.", show_default=False),
    ] = CHECKPOINT,
    size: Annotated[
        str | None, typer.Option(help="Give the policy the cost of a larger model first: 30M, 150M or 400M.")
    ] = None,
    prompts: Annotated[int, typer.Option(help="Problems.")] = _DEFAULT.prompts,
    samples: Annotated[int, typer.Option(help="Answers to each problem.")] = _DEFAULT.samples,
    batch: Annotated[int, typer.Option(help="Requests at once (max_num_seqs).")] = _DEFAULT.batch,
    max_tokens: Annotated[int, typer.Option(help="Tokens after which an answer is cut.")] = _DEFAULT.max_tokens,
    drafters: Annotated[str, typer.Option(help="Drafters, best first.")] = ",".join(_DEFAULT.drafters),
    max_draft_tokens: Annotated[int, typer.Option(help="Most draft tokens per step.")] = _DEFAULT.max_draft_tokens,
    budget: Annotated[str, typer.Option(help="auto or fixed.")] = _DEFAULT.budget,
    rounds: Annotated[int, typer.Option(help="Timed rounds; the medians are reported.")] = _DEFAULT.rounds,
    seed: Annotated[int, typer.Option(help="Of the problems and of sampling.")] = _DEFAULT.seed,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = _DEFAULT.dtype,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")] = None,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", help="Draw the running requests over time into this file.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Tell what was decided for the slowest requests, when and why.")
    ] = False,
    explain_requests: Annotated[int, typer.Option(help="How many requests --explain tells of.")] = 3,
    show_samples: Annotated[int, typer.Option(help="Answers to print.")] = 3,
    kv_gib: Annotated[int, typer.Option(help="GiB of KV cache of each engine.")] = 1,
    cache: Annotated[Path, typer.Option(help="Where inflated policies are kept.", show_default=False)] = CACHE,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.")] = False,
) -> None:
    """Roll the real policy out with drafts and without, and compare the tokens, the time and the rewards."""
    plan = Plan(
        prompts=prompts,
        samples=samples,
        batch=batch,
        max_tokens=max_tokens,
        rounds=rounds,
        seed=seed,
        drafters=flags.names(drafters, "--drafters", DRAFTERS),
        max_draft_tokens=max_draft_tokens,
        budget=budget,
        dtype=dtype,
        explain=flags.in_range(explain_requests, "--explain-requests", 1, 1000) if explain else 0,
    )
    flags.in_range(show_samples, "--show-samples", 0, plan.num_requests)
    check_writable(json, "--json")
    _check_plot(plot_to)
    check_model(model, "--model")
    with Display() as display:
        folder = model
        if size is not None:
            folder = inflated_policy(model, size, cache, display.counter(f"inflating the policy to {size}"))
        check_length(folder, plan.max_model_len())
        advance = display.steps(NUM_FIXED_UNITS + 2 * rounds)
        outcome = roll_out(plan, folder, advance, kv_gib=kv_gib, is_verbose=verbose)
    name = "the project's policy" if model == CHECKPOINT else model.resolve().name
    name += f", inflated to {size}" if size else ""
    title = f"{name}: {prompts} problems x {samples} answers, {dtype}"
    _print(plan, outcome, title, show_samples, display.out)
    if outcome.row.identical:
        print_explained(outcome.explained, display.out)
    if plot_to is not None and outcome.row.identical:
        plot(outcome.pair, batch, title, plot_to)
        display.out.print(f"wrote {plot_to}", markup=False)
    if json is not None:
        extra = {
            "mean_reward": outcome.mean_reward,
            "stock_ms_by_rows": outcome.stock_ms_by_rows,
            "samples": [_sample(s) for s in _shown(plan, outcome, show_samples)],
        }
        if explain:
            extra["explained"] = [one.as_dict() for one in outcome.explained]
        report = make_report("rollout", {"model": name, **plan.as_dict()}, [outcome.row], extra)
        json.write_text(report.as_json(), encoding="utf-8")
        display.out.print(f"wrote {json}", markup=False)
    if not outcome.row.identical:
        raise typer.Exit(1)


def _check_plot(path: Path | None) -> None:
    if path is None:
        return
    check_writable(path, "--plot")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"`--plot` is `{path}`, of a kind that cannot be drawn", "end it in .png, .svg or .pdf")
    check_matplotlib()


def _print(plan: Plan, outcome: Outcome, title: str, num_samples: int, out: Console) -> None:
    out.print(f"{title}, {plan.batch} at once, temperature 1", markup=False)
    print_rows([outcome.row], out)
    cut = sum(sample.num_tokens >= plan.max_tokens for sample in outcome.samples)
    lengths = sorted(sample.num_tokens for sample in outcome.samples)
    whose = "both" if outcome.row.identical else "stock"
    out.print(
        f"mean reward {outcome.mean_reward:.3f} ({whose}); answers of {lengths[0]} to {lengths[-1]} tokens,"
        f" median {lengths[len(lengths) // 2]}, {cut} cut off",
        markup=False,
    )
    for sample in _shown(plan, outcome, num_samples):
        out.print(f"\n[reward {sample.reward:g}, {sample.num_tokens} tokens] {sample.problem.prompt}", markup=False)
        # an untrained policy says anything, control characters too
        answer = "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in sample.answer)
        out.print(answer, markup=False, highlight=False)


def _shown(plan: Plan, outcome: Outcome, count: int) -> list[Sample]:
    """The first answer to each problem, then the second, ..."""
    return [sample for j in range(plan.samples) for sample in outcome.samples[j :: plan.samples]][:count]


def _sample(sample: Sample) -> dict[str, object]:
    kept = asdict(sample)
    problem = kept.pop("problem")
    return {"problem_id": problem["problem_id"], "prompt": problem["prompt"], **kept}
