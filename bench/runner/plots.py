"""Pictures: rollouts over time, an RL loop's epochs; the file's ending says the format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_specrollout.errors import UnsupportedError

from .engines import OURS, STOCK
from .rows import Pair, Run

_GREY, _BLUE = "#8a8f98", "#1f77b4"
_KNOWN = {STOCK: _GREY, OURS: _BLUE, "ngram": "#ff7f0e", "suffix": "#2ca02c"}
_COLOURS = ("#d62728", "#9467bd", "#8c564b", "#e377c2")


def check_matplotlib() -> None:
    """Refuse to plot without matplotlib, before anything runs."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise UnsupportedError(
            "`--plot` needs matplotlib, which is not installed", 'run `pip install "vllm-specrollout[bench]"`'
        ) from None


@contextmanager
def _panels(path: Path, title: str, count: int, width: float, **shape: Any) -> Iterator[Any]:
    """`count` axes side by side, written to the file in the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, count, figsize=(width, 3.6), squeeze=False, layout="constrained", **shape)
    yield grid[0]
    for axes in grid[0]:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def running_curve(run: Run, batch: int) -> tuple[list[float], list[int]]:
    """Times in seconds, and how many requests run from each on (at most `batch`; the others wait)."""
    return [0.0, *sorted(run.finish_s)], [min(batch, left) for left in range(len(run.finish_s), -1, -1)]


def plot_rollout(pair: Pair, batch: int, title: str, path: Path) -> None:
    """Requests still running over time, stock against ours."""
    with _panels(path, title, 1, 8) as (axes,):
        for name, run, colour in (("stock vLLM", pair.stock, _GREY), ("with drafts", pair.ours, _BLUE)):
            times, counts = running_curve(run, batch)
            label = f"{name}: {run.wall_s:.1f} s, {len(run.step_s)} steps"
            axes.step(times, counts, where="post", color=colour, linewidth=1.6, label=label)
            axes.fill_between(times, counts, step="post", color=colour, alpha=0.15)
        axes.set(xlabel="seconds", ylabel="running requests", xlim=(0, None), ylim=(0, batch * 1.08))
        axes.legend(loc="lower left", frameon=False)


def plot_epochs(steps: Sequence[Any], rows: Sequence[Any], title: str, path: Path) -> None:
    """Of an RL loop: reward by step, tokens per engine step by epoch, rollout time by step."""
    names = [run.engine for run in steps[0].runs]
    colours = _KNOWN | dict(zip([n for n in names if n not in _KNOWN], itertools.cycle(_COLOURS), strict=False))
    numbers, epochs = [step.step + 1 for step in steps], [row for row in rows if row.epoch.isdigit()]
    with _panels(path, title, 3, 13) as (rewards, tokens, times):
        for name in names:
            runs = [next(run for run in step.runs if run.engine == name) for step in steps]
            shared = {"color": colours[name], "label": name}
            if name in (STOCK, OURS):
                # identical answers earn identical rewards: the line on top is drawn thin
                style = {"linewidth": 4.0, "alpha": 0.5} if name == STOCK else {"linewidth": 1.2}
                rewards.plot(numbers, [run.reward for run in runs], **shared, **style)
            times.plot(numbers, [run.wall_s for run in runs], **shared, linewidth=1.6)
            values = [next(e.tokens_per_step for e in row.engines if e.engine == name) for row in epochs]
            tokens.plot([int(row.epoch) for row in epochs], values, **shared, marker="o", markersize=3)
        rewards.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
        tokens.set(xlabel="epoch", ylabel="tokens per engine step", ylim=(0, None))
        times.set(xlabel="step", ylabel="rollout, seconds", ylim=(0, None))
        for axes in (rewards, tokens, times):
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend(frameon=False, fontsize=8)
