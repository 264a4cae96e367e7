"""What would SpecActor's printed model need for decoupling to win 1.3x at batch 256? A scan of D, V and acceptance.

Three readings of decoupled speed, each over the better of coupled and plain decoding on the same GPUs (groups of 4 + 1
against groups of 4, so 1.25 times the batch):

- paper: tau as printed (section 4.1), one period per window;
- exact: a window with a miss lasts two periods, as the drafter begins anew (renewal);
- plain meanwhile: as simulated here, the verifier decodes plainly what has no window.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from vllm_specrollout.cluster.simulate.inputs import StudyInputs
from vllm_specrollout.cluster.simulate.report import Cell, ResultTable
from vllm_specrollout.cluster.simulate.step_line import StepLine
from vllm_specrollout.cluster.simulate.windows import (
    MAX_WINDOW,
    coupled_tgs,
    decoupled_tgs,
    plain_tgs,
)

_BATCH = 256
# per row beyond the knee, over the base divided by 256: 1 doubles the step at 256 further rows
_ROWS = (0.0, 0.1, 0.3, 1.0, 3.0)
# a drafted token at that batch, over the verifier's base
_DRAFTS = (0.05, 0.15, 0.3, 0.6, 1.0)
_ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
_WANTED = 1.3


def printed_tau(p: float, window: int) -> float:
    """Tokens per period as the paper prints them."""
    partial = sum(p**a * (1.0 - p) * (a + 1) / 2.0 for a in range(window))
    return partial + window * p**window


def printed_tgs(p: float, window: int, batch: int, verifier: StepLine, drafter: StepLine) -> float:
    """Tokens per ms and request by the paper's formula; w rows per window."""
    return printed_tau(p, window) / _period_ms(window, batch, verifier, drafter)


def exact_tgs(p: float, window: int, batch: int, verifier: StepLine, drafter: StepLine) -> float:
    """The same events, each with its own length."""
    tokens = sum(p**a * (1.0 - p) * (a + 1) for a in range(window)) + window * p**window
    return tokens / (2.0 - p**window) / _period_ms(window, batch, verifier, drafter)


def _period_ms(window: int, batch: int, verifier: StepLine, drafter: StepLine) -> float:
    return max(window * drafter.step_ms(batch), verifier.step_ms(batch, batch * (window - 1)))


READINGS = {"paper": printed_tgs, "exact": exact_tgs, "plain meanwhile": decoupled_tgs}


def gain(
    reading: Callable[[float, int, int, StepLine, StepLine], float], p: float, verifier: StepLine, drafter: StepLine
) -> float:
    """Decoupled over the better of coupled and plain, each with its best window."""
    windows = range(1, MAX_WINDOW + 1)
    apart = _BATCH * 5 // 4
    ahead = max(reading(p, window, apart, verifier, drafter) for window in windows)
    coupled = max(coupled_tgs(p, window, _BATCH, verifier, drafter) for window in windows)
    return ahead / max(coupled, plain_tgs(_BATCH, verifier))


def scan(inputs: StudyInputs) -> tuple[ResultTable, tuple[str, ...], dict[str, float]]:
    """The best gain of each reading by cost of rows, where it is found, and what reaches 1.3x."""
    base, request = inputs.number("base_ms"), inputs.number("request_ms")
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float] = {}
    reaching: dict[str, list[tuple[float, float, float]]] = {name: [] for name in READINGS}
    for row in _ROWS:
        verifier = StepLine(base=base, request=request, steep=row * base / _BATCH, knee=inputs.number("knee_rows"))
        cells: list[Cell] = [f"{row:g}", f"{row * base / _BATCH:.3f}"]
        for name, reading in READINGS.items():
            found = {
                (draft, p): gain(reading, p, verifier, StepLine(base=draft * base))
                for draft, p in itertools.product(_DRAFTS, _ACCEPTANCES)
            }
            draft, p = max(found, key=lambda key: found[key])
            cells.append(f"{found[draft, p]:.2f}x at D {draft * base:.1f} ms, p {p:g}")
            reaching[name] += [(row, *key) for key, value in found.items() if value >= _WANTED]
            figures[f"best gain, {name}"] = max(figures.get(f"best gain, {name}", 0.0), found[draft, p])
        rows.append(tuple(cells))
    columns = ("row cost of 256 rows / base", "ms per row", *READINGS)
    title = f"decoupled over the better of coupled and plain at batch {_BATCH}: the best over D and p"
    total = len(_ROWS) * len(_DRAFTS) * len(_ACCEPTANCES)
    found_all = tuple(_finding(name, cells, total, base) for name, cells in reaching.items())
    return ResultTable(title=title, columns=columns, rows=tuple(rows)), found_all, figures


def _finding(name: str, cells: list[tuple[float, float, float]], total: int, base: float) -> str:
    if not cells:
        return f"Reading `{name}`: 1.3x at batch {_BATCH} is reached in none of {total} cases."
    rows, drafts, ps = (sorted({cell[i] for cell in cells}) for i in range(3))
    return (
        f"Reading `{name}`: 1.3x at batch {_BATCH} is reached in {len(cells)} of {total} cases, with at most"
        f" {max(rows) * base / _BATCH:.3f} ms per row, D from {min(drafts) * base:.1f} to {max(drafts) * base:.1f} ms"
        f" and p of at least {min(ps):g}."
    )
