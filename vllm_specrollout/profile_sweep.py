"""The sweep behind `specrollout profile`: drafts of known sizes, whatever the target makes of them. No engine here.

What belongs here: which steps are run, and what their times are summed up to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specrollout.policies.budget import may_draft
from vllm_specrollout.policies.cost_model import StepCost
from vllm_specrollout.policies.fastgrpo import FastGrpoBudget
from vllm_specrollout.types import (
    EMPTY_TREE,
    ROOT,
    Choice,
    Decision,
    DraftTree,
    Ending,
    Feedback,
    RequestView,
    Shape,
    StepTiming,
)

SIZES = (0, 1, 2, 4, 8, 16)
"""Draft tokens per request; a chain of each size, and of the larger ones also a tree of `WIDTH` paths."""
WIDTH = 4
_SMALLEST_TREE = 8


@dataclass(frozen=True, slots=True)
class Draft:
    """What every request drafts in one step."""

    nodes: int
    width: int = 1


def drafts(sizes: Sequence[int] = SIZES) -> tuple[Draft, ...]:
    """The kinds of step that a sweep goes through, again and again, so that drift meets all of them alike."""
    return (*(Draft(n) for n in sizes), *(Draft(n, WIDTH) for n in sizes if n >= _SMALLEST_TREE))


def random_tree(draft: Draft, vocab_size: int, rng: np.random.Generator, source: int = 0) -> DraftTree:
    """`width` paths of equal length side by side, of random tokens; siblings differ."""
    nodes = np.arange(draft.nodes, dtype=np.int32)
    tokens = (int(rng.integers(vocab_size)) + nodes) % vocab_size
    parents = np.where(nodes < draft.width, ROOT, nodes - draft.width)
    return DraftTree(
        tokens.astype(np.int32),
        parents.astype(np.int32),
        np.full(draft.nodes, np.log(0.5), dtype=np.float32),
        np.full(draft.nodes, source, dtype=np.int32),
    )


class RandomDrafter:
    """Proposes random trees of the width asked for; the budget asks for their size."""

    name = "random"

    def __init__(self, vocab_size: int, sweep: Sweep, seed: int = 0) -> None:
        self._vocab_size, self._sweep = vocab_size, sweep
        self._rng = np.random.default_rng(seed)

    def propose(self, views: Sequence[RequestView], decisions: Sequence[Decision]) -> list[DraftTree]:
        return [self._one(decision) for decision in decisions]

    def _one(self, decision: Decision) -> DraftTree:
        if decision.shape is Shape.OFF or decision.max_nodes <= 0:
            return EMPTY_TREE
        width = 1 if decision.shape is Shape.CHAIN else self._sweep.now.width
        nodes = min(decision.max_nodes, decision.max_depth * width)
        return random_tree(Draft(nodes, width), self._vocab_size, self._rng)

    def observe(self, feedback: Sequence[Feedback]) -> None:
        """Nothing to learn."""

    def finish(self, ending: Ending) -> None:
        """Nothing outlives a request."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept per request."""


class Sweep:
    """A budget that goes through the kinds of draft, step after step, and keeps the times of all of them."""

    def __init__(self, kinds: Sequence[Draft]) -> None:
        self.kinds = tuple(kinds)
        self._step = 0
        self.now = self.kinds[0]
        self.is_recording = False
        self.timings: list[StepTiming] = []

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        self.now = self.kinds[self._step % len(self.kinds)]
        self._step += 1
        return [may_draft(view, self.now.nodes, max(self.now.nodes, 1), "profile") for view in views]

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        return list(trees)

    def explain(self) -> Choice | None:
        return None

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        if self.is_recording and timing is not None and timing.is_decode_only and timing.step_ms > 0.0:
            self.timings.append(timing)

    def finish(self, ending: Ending) -> None:
        """Nothing is kept per request."""


def shuffled(timings: Sequence[StepTiming]) -> list[StepTiming]:
    """In an order that is the same each time and puts like steps far apart: who forgets, forgets all kinds alike."""
    return [timings[i] for i in np.random.default_rng(0).permutation(len(timings))]


def summary(timings: Sequence[StepTiming]) -> dict[str, Any]:
    """What a table shows, in plain JSON types.

    Returns:
        "by_rows": per number of rows, "steps", their median "ms" and "fitted_ms", of steps without branches.
        "line": the cost model's terms, milliseconds. "error": its median relative error on these steps. "c_peak":
        rows of the knee (FastGRPO, Appendix B), None if time does not grow yet; "is_corner": False if that is the
        roofline of a straight line.
    """
    cost, knee = StepCost(), FastGrpoBudget(1, 1)
    cost.seed(shuffled(timings))
    knee.seed(shuffled(timings))
    fitted = [_fitted(cost, timing) for timing in timings]
    by_rows = []
    for rows in sorted({timing.rows for timing in timings if not timing.branches}):
        at = [i for i, timing in enumerate(timings) if timing.rows == rows and not timing.branches]
        by_rows.append(
            {
                "rows": rows,
                "steps": len(at),
                "ms": float(np.median([timings[i].step_ms for i in at])),
                "fitted_ms": float(np.median([fitted[i] for i in at])),
            }
        )
    errors = [abs(ms - timing.step_ms) / timing.step_ms for ms, timing in zip(fitted, timings, strict=True)]
    found = knee.knee
    return {
        "by_rows": by_rows,
        "line": {
            "fixed": cost.fixed,
            **{f"row_at_{rows}": cost.row_at(rows) for rows in (1, 16, 64, 256)},
            **{name: getattr(cost, name) for name in ("draft", "branch")},
        },
        "error": float(np.median(errors)),
        "c_peak": None if found is None else found.rows,
        "is_corner": found is not None and found.is_corner,
    }


def _fitted(cost: StepCost, timing: StepTiming) -> float:
    return cost.predict(
        timing.rows,
        timing.nodes,
        timing.branches,
        batch=timing.batch,
        trees=timing.trees,
        context=timing.context,
    )


def undisturbed(timings: Sequence[StepTiming], share: float = 3.0) -> list[StepTiming]:
    """Without steps that took `share` times the median of their kind: something else disturbed them."""
    kinds: dict[tuple[int, int, int], list[float]] = {}
    for timing in timings:
        kinds.setdefault((timing.batch, timing.rows, timing.branches), []).append(timing.step_ms)
    medians = {kind: float(np.median(times)) for kind, times in kinds.items()}
    return [
        timing for timing in timings if timing.step_ms <= share * medians[timing.batch, timing.rows, timing.branches]
    ]
