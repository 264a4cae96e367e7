"""TLT, Table 4: the speed-up of tree drafts by batch size and tokens to verify.

Time is counted in plain steps of batch 1. With accept length A(n) for n tokens to verify and batch B:

    speed-up(B, n) = A(n) * plain(B) / (plain(B) + rows(B * n) + draft(B))

The length of drafting follows from Table 1, which prints accept length and speed-up at depth 12: their ratio is the
cycle. Drafting at depth 10 takes 10 / 12 of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_specrollout.cluster.simulate.inputs import StudyInputs
from vllm_specrollout.cluster.simulate.report import Cell, Curve, ResultTable, StudyReport, error_of
from vllm_specrollout.cluster.simulate.step_line import StepLine


def speed_up(inputs: StudyInputs, batch: int, column: int) -> float:
    """Over plain decoding at the same batch.

    Args:
        column: which of the sizes in `tokens_to_verify`.
    """
    request, row, tokens = inputs.number("request"), inputs.number("row"), inputs.numbers("tokens_to_verify")
    line = StepLine(
        base=1.0 - request - row,
        request=request,
        row=row,
        steep=inputs.number("row_beyond_knee"),
        knee=inputs.number("knee_rows"),
    )
    drafting = inputs.number("cycle_of_table_1") - line.step_ms(1, inputs.number("tokens_of_table_1"))
    drafting *= inputs.number("depth") / inputs.number("depth_of_table_1")
    drafting += inputs.number("draft_request") * (batch - 1)
    cycle = line.step_ms(batch, batch * tokens[column]) + drafting
    return inputs.numbers("accept_length")[column] * line.step_ms(batch) / cycle


def is_fitted(inputs: StudyInputs, batch: int, tokens: float) -> bool:
    """Whether a cell was used to fit the free inputs."""
    ends = inputs.numbers("tokens_to_verify")
    return batch in inputs.numbers("fitted_rows") or (
        batch in inputs.numbers("fitted_ends") and tokens in (ends[0], ends[-1])
    )


def run(inputs: StudyInputs, seed: int) -> StudyReport:
    """All 24 cells; the seed changes nothing, since nothing is drawn."""
    batches = [int(batch) for batch in inputs.numbers("batch_sizes")]
    tokens = inputs.numbers("tokens_to_verify")
    printed = np.asarray(inputs.target_table("speed_up"))
    ours = np.asarray([[speed_up(inputs, batch, column) for column in range(len(tokens))] for batch in batches])
    fitted = np.asarray([[is_fitted(inputs, batch, size) for size in tokens] for batch in batches])
    error = np.abs(ours / printed - 1.0)
    right = int((ours.argmax(axis=1) == printed.argmax(axis=1)).sum())
    figures = {
        "worst error": float(error.max()),
        "worst error of predicted cells": float(error[~fitted].max()),
        "rms error of predicted cells": float(np.sqrt((error[~fitted] ** 2).mean())),
        "rows with the best column right": float(right),
    }
    slope = inputs.number("request") + inputs.number("row")
    figures["plain step of the last batch"] = 1.0 + slope * (batches[-1] - 1)
    return StudyReport(
        study="tlt-table-4",
        seed=seed,
        inputs=inputs,
        tables=(_table(batches, tokens, ours, printed, fitted),),
        figures=figures,
        findings=_findings(batches, ours, printed, fitted, figures),
        curves=_curves(batches, tokens, ours, printed),
        axes=("tokens to verify", "speed-up over plain decoding"),
    )


def _findings(
    batches: Sequence[int], ours: np.ndarray, printed: np.ndarray, fitted: np.ndarray, figures: dict[str, float]
) -> tuple[str, ...]:
    found = [
        f"Cells with * were used to fit the free inputs: {int(fitted.sum())} of {fitted.size}. The others are"
        f" predicted, at most {figures['worst error of predicted cells']:.1%} off"
        f" (rms {figures['rms error of predicted cells']:.1%}).",
        f"The best column is right in {int(figures['rows with the best column right'])} of {len(batches)} rows.",
    ]
    slow = figures["plain step of the last batch"]
    found.append(
        f"The fit makes a plain step of batch {batches[-1]} last {slow:.1f} steps of batch 1, and drafting grow alike."
        " Ratios do not tell the two apart, so read both as effective values."
    )
    for batch, row in zip(batches, ours, strict=True):
        second, first = np.sort(row)[-2:]
        if first / second < 1.005:
            found.append(f"At batch {batch} our best two columns differ by {first / second - 1:.1%}: that is a tie.")
    return tuple(found)


def _table(
    batches: Sequence[int], tokens: Sequence[float], ours: np.ndarray, printed: np.ndarray, fitted: np.ndarray
) -> ResultTable:
    rows: list[tuple[Cell, ...]] = []
    for batch, own, theirs, used in zip(batches, ours, printed, fitted, strict=True):
        cells = [
            f"{a:.2f} / {b:.2f} {error_of(a, b)}{'*' if was_used else ''}"
            for a, b, was_used in zip(own, theirs, used, strict=True)
        ]
        best = f"{tokens[int(own.argmax())]:.0f} / {tokens[int(theirs.argmax())]:.0f}"
        rows.append((batch, *cells, best))
    columns = ("batch", *(f"{size:.0f} tokens" for size in tokens), "best")
    return ResultTable(title="speed-up, ours / paper", columns=columns, rows=tuple(rows))


def _curves(
    batches: Sequence[int], tokens: Sequence[float], ours: np.ndarray, printed: np.ndarray
) -> tuple[Curve, ...]:
    curves = []
    for batch, own, theirs in zip(batches, ours, printed, strict=True):
        curves.append(Curve(label=f"batch {batch}", x=tuple(tokens), y=tuple(own.tolist())))
        curves.append(Curve(label=f"batch {batch}, paper", x=tuple(tokens), y=tuple(theirs.tolist()), is_printed=True))
    return tuple(curves)
