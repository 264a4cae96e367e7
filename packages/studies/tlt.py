"""TLT: Table 4 by batch and tokens to verify."""

from __future__ import annotations

import numpy as np
from vllm_specrollout.bench.studies.formulas import StepLine
from vllm_specrollout.bench.studies.report import Cell, Inputs, Number, ResultTable, StudyReport, error_of

BATCHES, TOKENS = (1, 2, 4, 8, 16, 32), (16, 32, 48, 64)
"""Rows and columns of Table 4."""
PRINTED = (
    (3.22, 3.46, 3.56, 3.62),
    (3.08, 3.28, 3.39, 3.38),
    (3.01, 3.09, 3.13, 2.98),
    (2.73, 2.63, 2.51, 2.27),
    (2.67, 2.52, 2.24, 1.91),
    (2.48, 2.23, 1.90, 1.70),
)
FITTED = np.asarray([[b in (1, 4) or (b == 32 and n in (16, 64)) for n in TOKENS] for b in BATCHES])
"""Cells that the free inputs were fitted to, by least squares of the logarithms. Batch 1 shows the accept lengths,
batch 4 where the best column turns, and the ends of batch 32 what rows and requests cost."""


class Table4Inputs(Inputs):
    """Time is in plain steps of batch 1."""

    # text, Table 4
    depth: Number = 10
    # text, Table 1
    depth_of_table_1: Number = 12
    tokens_of_table_1: Number = 64
    # derived from Table 1, topK 8: accept length 8.67 over speed-up 3.64
    cycle_of_table_1: Number = 2.382
    # free, set: the power of two below H100's 295 rows (989 Tflop/s of bf16 over 3.35 TB/s)
    knee_rows: Number = 256
    # free, fitted: per request, per row below and beyond the knee, of drafting per further request; tokens a cycle
    request: Number = 0.11506
    row: Number = 0.00310
    row_beyond_knee: Number = 0.00603
    draft_request: Number = 0.13667
    accept_length: tuple[Number, Number, Number, Number] = (6.554, 7.198, 7.666, 7.867)


def speed_up(inputs: Table4Inputs, batch: int, accept_length: float, tokens: int) -> float:
    """Over plain decoding: A(n) plain(B) / (plain(B) + rows(B n) + draft(B)).

    Table 1 prints accept length and speed-up at depth 12: their ratio is the cycle, and what is no step is drafting.
    """
    request, row, beyond = inputs.request, inputs.row, inputs.row_beyond_knee
    line = StepLine(base=1.0 - request - row, request=request, row=row, steep=beyond, knee=inputs.knee_rows)
    drafting = inputs.cycle_of_table_1 - line.step_ms(1, inputs.tokens_of_table_1)
    drafting *= inputs.depth / inputs.depth_of_table_1
    drafting += inputs.draft_request * (batch - 1)
    return accept_length * line.step_ms(batch) / (line.step_ms(batch, batch * tokens) + drafting)


def speed_ups(inputs: Table4Inputs) -> np.ndarray:
    """[batches, tokens] of Table 4."""
    columns = list(zip(inputs.accept_length, TOKENS, strict=True))
    return np.asarray([[speed_up(inputs, batch, *column) for column in columns] for batch in BATCHES])


def run_table_4(inputs: Table4Inputs, seed: int) -> StudyReport:
    """TLT, Table 4: the speed-up by batch size and tokens to verify.

    All 24 cells; the seed changes nothing, since nothing is drawn.
    """
    printed, ours = np.asarray(PRINTED), speed_ups(inputs)
    error = np.abs(ours / printed - 1.0)
    predicted = error[~FITTED]
    rows: list[tuple[Cell, ...]] = []
    for batch, own, theirs, used in zip(BATCHES, ours, printed, FITTED, strict=True):
        cells = (
            f"{a:.2f} / {b:.2f} {error_of(a, b)}{'*' if u else ''}" for a, b, u in zip(own, theirs, used, strict=True)
        )
        rows.append((str(batch), *cells, f"{TOKENS[own.argmax()]} / {TOKENS[theirs.argmax()]}"))
    right = int((ours.argmax(axis=1) == printed.argmax(axis=1)).sum())
    slow = 1.0 + (inputs.request + inputs.row) * (BATCHES[-1] - 1)
    worst, rms = float(predicted.max()), float(np.sqrt((predicted**2).mean()))
    ties = [(batch, *np.sort(own)[-2:]) for batch, own in zip(BATCHES, ours, strict=True)]
    return StudyReport(
        title="TLT, Table 4: Qwen-32B, TP 4, H100, depth 10, topK 8",
        tables=(
            ResultTable("speed-up, ours / paper", ("batch", *(f"{n} tokens" for n in TOKENS), "best"), tuple(rows)),
        ),
        figures={
            "worst error": float(error.max()),
            "worst error of predicted cells": worst,
            "rms error of predicted cells": rms,
            "rows with the best column right": right,
            "plain step of the last batch": slow,
        },
        findings=(
            f"Cells with * were used to fit the free inputs: {FITTED.sum()} of {FITTED.size}. The others are predicted,"
            f" at most {worst:.1%} off (rms {rms:.1%}).",
            f"The best column is right in {right} of {len(BATCHES)} rows.",
            f"The fit makes a plain step of batch {BATCHES[-1]} last {slow:.1f} steps of batch 1, and drafting grow"
            " alike. Ratios do not tell the two apart, so read both as effective values.",
            *(
                f"At batch {batch} our best two columns differ by {first / second - 1:.1%}: that is a tie."
                for batch, second, first in ties
                if first / second < 1.005
            ),
        ),
    )
