"""`specrollout plan ladder`: what each drafting method is worth by acceptance, as a table, a file and a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from vllm_specrollout.cli import flags
from vllm_specrollout.decoupled.ladder import Ladder, build_ladder, select_method
from vllm_specrollout.decoupled.rates import Mode
from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.time_flags import read_methods, verify_times

_SHOWN = 4  # of so many acceptances one is a line of the table


def plan_ladder_command(
    methods: Annotated[Path, typer.Option(help='JSON: `{"0.5B": TIME, "ngram": TIME}`.', show_default=False)],
    verify_ms: Annotated[
        str, typer.Option(help="A step of b requests with n drafted rows: `13+0.04*b+0.03*n`.", show_default=False)
    ],
    batch: Annotated[int, typer.Option(help="Requests of a worker.")] = 1,
    mode: Annotated[str, typer.Option(help="coupled or decoupled.")] = "coupled",
    accept: Annotated[
        str | None, typer.Option(help="Historic acceptance by method, to choose one: `0.5B=0.7,ngram=0.3`.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the tokens accepted at random.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the ladder to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it; the ending says the format.")] = None,
) -> None:
    """Build a draft ladder from times alone: speed-up over plain decoding by method and acceptance."""
    flags.in_range(batch, "--batch", 1, 1 << 16)
    flags.choice(mode, "--mode", (Mode.COUPLED.value, Mode.DECOUPLED.value))
    flags.in_range(seed, "--seed", 0, (1 << 63) - 1)
    for path, flag in ((out, "--out"), (plot, "--plot")):
        flags.check_writable(path, flag)
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            "`--plot` needs matplotlib, which is not installed", 'run `pip install "vllm-specrollout[bench]"`'
        )
    times = {name: fit.time for name, fit in read_methods(methods, "--methods").items()}
    verify = verify_times(verify_ms, "--verify-ms", (1,))[1]
    history = {} if accept is None else _history(accept, tuple(times))
    if verify.ms(1) <= 0.0:
        raise ConfigError(f"`--verify-ms` is {verify_ms!r}, a step that takes no time", "measure a step")
    ladder = build_ladder(times, verify, batch=batch, mode=Mode(mode), rng=np.random.default_rng(seed))
    _print(ladder, history)
    if out is not None:
        ladder.save(out)
    if plot is not None:
        _draw(ladder, history, plot)


def _history(text: str, methods: tuple[str, ...]) -> dict[str, float]:
    """`0.5B=0.7,ngram=0.3` -> {"0.5B": 0.7, "ngram": 0.3}."""
    found = {}
    for part in text.split(","):
        name, _, rate = part.strip().partition("=")
        flags.choice(name, "--accept", methods)
        if name in found:
            raise ConfigError(f"`--accept` names {name!r} twice", "name each method once")
        found[name] = flags.probabilities(rate, f"--accept {name}=")[0]
    return found


def _print(ladder: Ladder, history: dict[str, float]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table(pad_edge=False)
    table.add_column("acceptance", no_wrap=True)
    for method in ladder.methods:
        table.add_column(method, justify="right")
    for i in range(0, len(ladder.acceptance), _SHOWN):
        cells = [f"{rung.speedups[i]:.2f}x (w {rung.windows[i]})" for rung in ladder.rungs]
        table.add_row(f"{ladder.acceptance[i]:.2f}", *cells)
    console.print(table)
    off = max(abs(d / s - 1.0) for rung in ladder.rungs for d, s in zip(rung.drawn, rung.speedups, strict=True))
    console.print(f"{ladder.mode.value}, batch {ladder.batch}; drawn at random: at most {off:.1%} off", highlight=False)
    if history:
        found = select_method(ladder, history)
        shown = ", ".join(f"{method} {speed:.2f}x" for method, speed in found.speedups.items())
        chosen = found.method or "none: plain decoding is faster"
        console.print(f"chosen for the batch: {chosen} ({shown})", markup=False, highlight=False)


def _draw(ladder: Ladder, history: dict[str, float], path: Path) -> None:
    """Lines by formula, dots as drawn, and a ring at each method's historic acceptance."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for rung in ladder.rungs:
        (line,) = axes.plot(ladder.acceptance, rung.speedups, label=rung.method)
        axes.plot(ladder.acceptance, rung.drawn, ".", color=line.get_color(), markersize=4)
        if rung.method in history:
            at = history[rung.method]
            axes.plot(at, ladder.speedup(rung.method, at), "o", color=line.get_color(), markerfacecolor="none")
    axes.axhline(1.0, color="#8a8f98", linewidth=0.8)
    axes.set_xlabel("acceptance")
    axes.set_ylabel("speed-up over plain")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError(f"`--plot` is `{path}`: {error}", "end the name in .png, .pdf or .svg") from None
    finally:
        pyplot.close(figure)
