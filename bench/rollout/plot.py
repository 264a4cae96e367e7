"""The picture of a rollout: requests still running over time, stock against ours."""

from __future__ import annotations

from pathlib import Path

from vllm_specrollout.errors import UnsupportedError

from ..common.rows import Pair
from ..common.runs import Run

_STOCK_COLOUR, _OUR_COLOUR = "#8a8f98", "#1f77b4"


def check_matplotlib() -> None:
    """Refuse to plot without matplotlib, before the rollout runs.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise UnsupportedError(
            "`--plot` needs matplotlib, which is not installed", 'run `pip install "vllm-specrollout[bench]"`'
        ) from None


def running_curve(run: Run, batch: int) -> tuple[list[float], list[int]]:
    """Times in seconds, and how many requests run from each on (at most `batch`; the others wait)."""
    left = len(run.finish_s)
    times, counts = [0.0], [min(batch, left)]
    for finish in sorted(run.finish_s):
        left -= 1
        times.append(finish)
        counts.append(min(batch, left))
    return times, counts


def plot(pair: Pair, batch: int, title: str, path: Path) -> None:
    """Write the picture of one pair of runs; the file's ending chooses the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    curves = (("stock vLLM", pair.stock, _STOCK_COLOUR), ("with drafts", pair.ours, _OUR_COLOUR))
    for name, run, colour in curves:
        times, counts = running_curve(run, batch)
        label = f"{name}: {run.wall_s:.1f} s, {len(run.step_s)} steps"
        axes.step(times, counts, where="post", color=colour, linewidth=1.6, label=label)
        axes.fill_between(times, counts, step="post", color=colour, alpha=0.15)
    axes.set(xlabel="seconds", ylabel="running requests", title=title, xlim=(0, None), ylim=(0, batch * 1.08))
    axes.legend(loc="lower left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
