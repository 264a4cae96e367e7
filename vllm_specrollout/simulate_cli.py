"""`specrollout simulate`: a study's inputs in; our figures beside the paper's out. Needs neither vLLM nor torch."""

from __future__ import annotations

import importlib.util
import json as json_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_specrollout.cli import flags
from vllm_specrollout.cluster.simulate.inputs import Given, Numbers, StudyInputs
from vllm_specrollout.cluster.simulate.registry import STUDIES, run_study
from vllm_specrollout.cluster.simulate.report import ResultTable, StudyReport
from vllm_specrollout.errors import ConfigError, UnsupportedError


def simulate_command(
    study: Annotated[str | None, typer.Argument(metavar="STUDY", help="See `--list`.", show_default=False)] = None,
    list_studies: Annotated[bool, typer.Option("--list", help="Say which studies there are.")] = False,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    inputs: Annotated[Path | None, typer.Option(help="A file of inputs instead of the shipped one.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write inputs and results to this file.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw a picture (needs matplotlib).")] = None,
) -> None:
    """Simulate a published experiment event by event: our figures beside the paper's, and where each input is from."""
    out = Console(markup=False, highlight=False)
    if list_studies:
        for name, meaning in STUDIES.items():
            out.print(f"{name:<16}{meaning}", soft_wrap=True)
        return
    if study is None:
        raise ConfigError("no STUDY was named", f"choose from: {', '.join(STUDIES)}")
    flags.in_range(seed, "--seed", 0, 2**32 - 1)
    flags.check_writable(json, "--json")
    flags.check_writable(plot, "--plot")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            "`--plot` needs matplotlib, which is not installed", 'run `pip install "vllm-specrollout[bench]"`'
        )
    report = run_study(study, seed, inputs)
    if not out.is_terminal:
        out = Console(markup=False, highlight=False, width=160)
    _print(report, out)
    if json is not None:
        json.write_text(json_module.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
        out.print(f"wrote {json}")
    if plot is not None:
        _draw(report, plot)
        out.print(f"wrote {plot}")


def _print(report: StudyReport, out: Console) -> None:
    out.print(f"{report.inputs.title}\n")
    out.print(_inputs(report.inputs))
    for table in report.tables:
        out.print(f"\n{table.title}")
        out.print(_table(table))
    out.print()
    for finding in report.findings:
        out.print(f"- {finding}", soft_wrap=True)


def _inputs(inputs: StudyInputs) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("input", "value", "unit", "mark", "source", "how"):
        table.add_column(title, no_wrap=title in ("input", "mark"))
    for given in inputs.inputs.values():
        table.add_row(given.name, _value(given), given.unit, given.mark, given.source, given.how)
    return table


def _value(given: Given) -> str:
    def shown(value: Numbers) -> str:
        return ", ".join(map(shown, value)) if isinstance(value, tuple) else f"{value:g}"

    return shown(given.value)


def _table(result: ResultTable) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in result.columns:
        table.add_column(title, justify="left" if title == result.columns[0] else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(*(f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in row))
    return table


def _draw(report: StudyReport, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for curve in report.curves:
        if curve.is_printed:
            # the paper's points take the colour of our line before them
            axes.plot(curve.x, curve.y, "o", color=axes.lines[-1].get_color(), markersize=4)
        else:
            axes.plot(curve.x, curve.y, label=curve.label, linewidth=1.5)
    axes.set(xlabel=report.axes[0], ylabel=report.axes[1], title=report.inputs.title)
    axes.spines[["top", "right"]].set_visible(False)
    if report.curves:
        axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
