"""The picture of a sweep: one panel per accuracy, speed-up over batch for `auto` and for each fixed draft length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..common.tuned import AUTO
from .plan import LIMIT, SweepRow


def plot(rows: Sequence[SweepRow], title: str, path: Path) -> None:
    """Write the picture; the file's ending chooses the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    accuracies = list(dict.fromkeys(row.accuracy for row in rows))
    figure, grid = pyplot.subplots(
        1, len(accuracies), figsize=(3.4 * len(accuracies) + 1, 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, accuracy in zip(grid[0], accuracies, strict=True):
        own = [row for row in rows if row.accuracy == accuracy and row.speedup is not None]
        axes.set_prop_cycle(color=["#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b"])
        for name, draft in sorted({(row.name, row.draft) for row in own}):
            line = sorted((row.batch, row.speedup) for row in own if (row.name, row.draft) == (name, draft))
            is_auto = name == AUTO.name
            style = {"color": "#1f77b4", "linewidth": 2.2} if is_auto else {"linewidth": 1.0, "alpha": 0.7}
            label = name if is_auto else f"{draft} tokens"
            axes.plot(
                *zip(*line, strict=True), marker="o", markersize=3, label=label, zorder=3 if is_auto else 2, **style
            )
        axes.axhline(1.0, color="#8a8f98", linewidth=0.8)
        axes.axhline(LIMIT, color="#8a8f98", linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="batch", title="real drafters" if accuracy is None else f"accuracy {accuracy:g}")
    grid[0][0].set(ylabel="speed-up against stock")
    grid[0][-1].legend(frameon=False, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
