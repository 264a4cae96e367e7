"""What would SpecActor's printed model need for decoupling to win 1.3x at batch 256? A scan of D, V and acceptance.

Three readings of decoupled speed, each over the better of coupled and plain decoding on the same GPUs (groups of 4 + 1
against groups of 4, so 1.25 times the batch):

- paper: tau as printed (section 4.1), one period per window;
- exact: a window with a miss lasts two periods, as the drafter begins anew (renewal);
- plain meanwhile: as simulated here, the verifier decodes plainly what has no window.
"""

from __future__ import annotations

import itertools

from vllm_specrollout.cluster.simulate.inputs import StudyInputs
from vllm_specrollout.cluster.simulate.report import Cell, ResultTable
from vllm_specrollout.cluster.simulate.step_line import StepLine
from vllm_specrollout.cluster.simulate.windows import Rate
from vllm_specrollout.decoupled.rates import (
    Time,
    coupled_rate,
    decoupled_rate,
    plain_rate,
    printed_rate,
    tokens_per_window,
)
from vllm_specrollout.decoupled.reconfigure import MAX_WINDOW

_BATCH = 256
# per row beyond the knee, over the base divided by 256: 1 doubles the step at 256 further rows
_ROWS = (0.0, 0.1, 0.3, 1.0, 3.0)
# a drafted token at that batch, over the verifier's base
_DRAFTS = (0.05, 0.15, 0.3, 0.6, 1.0)
_ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
_WANTED = 1.3


def exact_rate(draft: Time, verify: Time, batch: int, window: int, match_rate: float) -> float:
    """The paper's periods, each with its own length: a window with a miss lasts two."""
    period = max(window * draft.ms(batch), verify.ms(batch, window - 1))
    return tokens_per_window(match_rate, window) / period


READINGS: dict[str, Rate] = {"paper": printed_rate, "exact": exact_rate, "plain meanwhile": decoupled_rate}


def gain(reading: Rate, p: float, verifier: StepLine, drafter: StepLine) -> float:
    """Decoupled over the better of coupled and plain, each with its best window."""
    windows = range(1, MAX_WINDOW + 1)
    apart = _BATCH * 5 // 4
    ahead = max(reading(drafter, verifier, apart, window, p) for window in windows)
    coupled = max(coupled_rate(drafter, verifier, _BATCH, window, p) for window in windows)
    return ahead / max(coupled, plain_rate(verifier, _BATCH))


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
