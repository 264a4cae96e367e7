"""A run's curves as a picture: the loss, and how often the levels agree with the target."""

from __future__ import annotations

import json
from pathlib import Path


def draw(metrics: Path, picture: Path) -> None:
    """Draw what `TrainingRun` wrote line by line; the picture's ending says its format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [line["step"] for line in lines]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    left.plot(steps, [line["loss"] for line in lines])
    left.set_ylabel("loss, nats")
    for level in range(len(lines[-1]["agreement"])):
        right.plot(steps, [line["agreement"][level] for line in lines], label=f"levels 1 to {level + 1}")
    right.set_ylabel("drafts that agree")
    right.set_ylim(0, 1)
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)
