"""`specrollout bench grpo`: flags in; tables, trace, picture and JSON out."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_specrollout.errors import ConfigError

from ..common import flags
from ..common.display import Display
from ..common.models import CACHE, CHECKPOINT, check_model, inflated_policy
from ..common.report import check_writable, make_report
from ..policy.errors import PolicyError
from ..policy.grpo import GrpoConfig
from ..rollout.plot import check_matplotlib
from .engines import Engines, suffix_problem
from .loop import Loop, Models, Outcome, num_units
from .plan import ABLATIONS, DEFAULT_SPEC_ROLLOUT, DEFAULT_SPECULATIVE, ENGINES, Arm, Plan, json_object, make_arms
from .rows import SUFFIX, EpochRow, epoch_rows
from .show import plot, print_ablation, print_epochs, print_notes

_DEFAULT = Plan()
_GRPO = GrpoConfig()
_QUICK = {"problems": 2, "problems_per_step": 2, "samples": 2, "epochs": 2, "batch": 4, "max_tokens": 24}
"""What `--quick` puts in place of the sizes."""


def bench_grpo(
    model: Annotated[
        Path,
        typer.Option(help="The policy's folder; default: the one that comes with the project.", show_default=False),
    ] = CHECKPOINT,
    size: Annotated[
        str, typer.Option(help="Cost of the model the engines run: 30M, 150M, 400M, or `none` for the policy as it is.")
    ] = "150M",
    engines: Annotated[str, typer.Option(help=f"Which engines roll out: {', '.join(ENGINES)}.")] = "stock,ours",
    spec_rollout: Annotated[
        str, typer.Option(help="Our engine's configuration, JSON or a file of it.")
    ] = json_module.dumps(DEFAULT_SPEC_ROLLOUT),
    ngram: Annotated[str, typer.Option(help="`speculative_config` of the ngram engine.")] = json_module.dumps(
        DEFAULT_SPECULATIVE["ngram"]
    ),
    suffix: Annotated[str, typer.Option(help="`speculative_config` of the suffix engine.")] = json_module.dumps(
        DEFAULT_SPECULATIVE["suffix"]
    ),
    suffix_path: Annotated[str, typer.Option(help="Folder that holds arctic_inference, if not installed.")] = "",
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also run ours without one part of its history each.")
    ] = False,
    problems: Annotated[int, typer.Option(help="Problems of the fixed set.")] = _DEFAULT.problems,
    problems_per_step: Annotated[int, typer.Option(help="Problems between two updates.")] = _DEFAULT.problems_per_step,
    samples: Annotated[int, typer.Option(help="Answers to each problem.")] = _DEFAULT.samples,
    epochs: Annotated[int, typer.Option(help="Passes over the problems.")] = _DEFAULT.epochs,
    family: Annotated[str | None, typer.Option(help="arith or puzzle; default: both in turns.")] = None,
    batch: Annotated[int, typer.Option(help="Requests at once (max_num_seqs).")] = _DEFAULT.batch,
    max_tokens: Annotated[int, typer.Option(help="Tokens after which an answer is cut.")] = _DEFAULT.max_tokens,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = _GRPO.learning_rate,
    clip: Annotated[float, typer.Option(help="Ratios outside 1 +- this earn nothing more.")] = _GRPO.clip_low,
    kl: Annotated[float, typer.Option(help="Weight of the KL divergence from the first policy.")] = _GRPO.kl_weight,
    inner_epochs: Annotated[int, typer.Option(help="Passes over a rollout's answers.")] = _GRPO.inner_epochs,
    minibatches: Annotated[int, typer.Option(help="Optimiser steps per pass.")] = _GRPO.minibatches,
    threads: Annotated[int, typer.Option(help="Torch threads of the trainer.")] = _DEFAULT.threads,
    seed: Annotated[int, typer.Option(help="Of the problems, their order and sampling.")] = _DEFAULT.seed,
    dtype: Annotated[str, typer.Option(help="Of the engines: bfloat16 or float32.")] = _DEFAULT.dtype,
    quick: Annotated[bool, typer.Option("--quick", help="A few short answers only, whatever the sizes say.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")] = None,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", help="Draw rewards, tokens and times into this file.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write every rollout's answers into this folder.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the trained policy into this folder.")] = None,
    kv_gib: Annotated[int, typer.Option(help="GiB of KV cache of each engine.")] = 1,
    cache: Annotated[Path, typer.Option(help="Where inflated policies are kept.", show_default=False)] = CACHE,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.")] = False,
) -> None:
    """Train the small policy by GRPO, rolled out by stock vLLM and by others, their tokens compared."""
    grpo = _grpo_config(
        learning_rate=learning_rate,
        clip_low=clip,
        clip_high=clip,
        kl_weight=kl,
        inner_epochs=inner_epochs,
        minibatches=minibatches,
        seed=seed,
    )
    plan = Plan(
        problems=problems,
        problems_per_step=problems_per_step,
        samples=samples,
        epochs=epochs,
        family=family,
        batch=batch,
        max_tokens=max_tokens,
        seed=seed,
        dtype=dtype,
        threads=threads,
        grpo=grpo,
    )
    plan = replace(plan, **_QUICK) if quick else plan  # type: ignore[arg-type]
    speculative = {"ngram": json_object(ngram, "--ngram"), "suffix": json_object(suffix, "--suffix")}
    ours = json_object(spec_rollout, "--spec-rollout")
    names = flags.names(engines, "--engines", ENGINES)
    arms = make_arms(names, ours, speculative, suffix_path, is_ablation=ablate)
    _check_outputs(json, plot_to, trace, save)
    check_model(model, "--model")
    arms, missing = _without_missing_suffix(arms, suffix_path)
    with Display() as display:
        outcome = _run(plan, arms, model, size, cache, display, trace, save, kv_gib=kv_gib, is_verbose=verbose)
    rows = epoch_rows(outcome.steps)
    title = "the project's policy" if model == CHECKPOINT else model.resolve().name
    title += f", {'as it is' if size == 'none' else f'inflated to {size}'}, {dtype}"
    title += f": {plan.problems} problems x {plan.samples} answers x {plan.epochs} epochs, {plan.batch} at once"
    display.out.print(title, markup=False)
    print_epochs(rows, display.out)
    if ablate:
        print_ablation(rows, display.out)
    print_notes(outcome.steps, [*missing, *outcome.notes], display.out)
    _write(json, plot_to, title, plan, arms, outcome, rows, display)
    if any(run.identical is False for step in outcome.steps for run in step.runs):
        raise typer.Exit(1)


def _grpo_config(**values: Any) -> GrpoConfig:
    try:
        return GrpoConfig(**values)
    except PolicyError as error:
        cause, _, hint = str(error).partition("\n\nhint: ")
        raise ConfigError(cause, hint) from None


def _run(
    plan: Plan,
    arms: Sequence[Arm],
    model: Path,
    size: str,
    cache: Path,
    display: Display,
    trace: Path | None,
    save: Path | None,
    *,
    kv_gib: int,
    is_verbose: bool,
) -> Outcome:
    """Make the engines' model, start the engines, run the loop."""
    served, grown = model, None if size == "none" else size
    if grown is not None:
        served = inflated_policy(model, grown, cache, display.counter(f"inflating the policy to {grown}"))
    together = [arm for arm in arms if arm.name not in ABLATIONS]
    variants = [arm for arm in arms if arm.name in ABLATIONS]
    report = display.steps(num_units(plan, together, variants))
    with Engines(plan, together, served, kv_gib=kv_gib, is_verbose=is_verbose) as running:
        models = Models(policy=model, served=served, size=grown)
        return Loop(plan, models, running, report, trace).run(save, variants)


def _check_outputs(json: Path | None, plot_to: Path | None, trace: Path | None, save: Path | None) -> None:
    check_writable(json, "--json")
    for folder, flag in ((trace, "--trace"), (save, "--save")):
        if folder is not None and folder.is_file():
            raise ConfigError(f"`{flag}` is `{folder}`, which is a file", "name a folder")
    if trace is not None and any(trace.glob("rollout-*")):
        raise ConfigError(f"`--trace` is `{trace}`, which holds another trace", "name a new folder, or empty this one")
    if plot_to is not None:
        check_writable(plot_to, "--plot")
        if plot_to.suffix not in (".png", ".svg", ".pdf"):
            raise ConfigError(
                f"`--plot` is `{plot_to}`, of a kind that cannot be drawn", "end it in .png, .svg or .pdf"
            )
        check_matplotlib()


def _without_missing_suffix(arms: Sequence[Arm], suffix_path: str) -> tuple[list[Arm], list[str]]:
    """The arms that can run, and a line about the one that cannot."""
    if all(arm.name != SUFFIX for arm in arms):
        return list(arms), []
    problem = suffix_problem(suffix_path)
    if problem is None:
        return list(arms), []
    note = f"suffix was left out: arctic_inference cannot be imported ({problem}); name its folder with `--suffix-path`"
    return [arm for arm in arms if arm.name != SUFFIX], [note]


def _write(
    json: Path | None,
    plot_to: Path | None,
    title: str,
    plan: Plan,
    arms: Sequence[Arm],
    outcome: Outcome,
    rows: Sequence[EpochRow],
    display: Display,
) -> None:
    if plot_to is not None:
        plot(outcome.steps, rows, title, plot_to)
        display.out.print(f"wrote {plot_to}", markup=False)
    if json is not None:
        settings: dict[str, Any] = {"title": title, **plan.as_dict(), "engines": [_arm_dict(arm) for arm in arms]}
        extra = {"epochs": [asdict(row) for row in rows], "notes": list(outcome.notes)}
        report = make_report("grpo", settings, outcome.steps, extra)  # type: ignore[arg-type]
        json.write_text(report.as_json(), encoding="utf-8")
        display.out.print(f"wrote {json}", markup=False)


def _arm_dict(arm: Arm) -> dict[str, Any]:
    return {"name": arm.name, "spec_rollout": arm.spec_rollout, "speculative_config": arm.speculative}
