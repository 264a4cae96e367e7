"""TLT, Tables 7 and 8: at batch 1 a drafter's cycle takes the same time whatever is accepted in it.

A cycle drafts and verifies once and yields `accept length` tokens, so throughput = accept length / cycle. One row per
drafter gives its cycle time; the drafter's other rows are predicted.
"""

from __future__ import annotations

from vllm_specrollout.cluster.simulate.inputs import StudyInputs
from vllm_specrollout.cluster.simulate.report import Cell, ResultTable, StudyReport, error_of

# per drafter: the input with its cycle time, and the printed row (accept length, tokens per second) that gave it
_DRAFTERS = {
    "EAGLE": ("eagle_cycle_ms", "eagle"),
    "Qwen2.5-0.5B": ("small_model_cycle_ms", "small_model"),
    "HASS": ("hass_cycle_ms", "hass"),
    "EAGLE-3": ("eagle3_cycle_ms", "eagle3"),
}


def run(inputs: StudyInputs, seed: int) -> StudyReport:
    """Every printed row; the seed changes nothing, since nothing is drawn."""
    plain_ms = inputs.number("plain_ms")
    rows: list[tuple[Cell, ...]] = []
    figures = {"plain_ms": plain_ms}
    worst = 0.0
    for drafter, (cycle, target) in _DRAFTERS.items():
        cycle_ms = inputs.number(cycle)
        for number, (accept_length, printed) in enumerate(inputs.target_table(target)):
            ours, printed_ms = 1e3 * accept_length / cycle_ms, 1e3 * accept_length / printed
            worst = max(worst, abs(cycle_ms / printed_ms - 1.0))
            kind = "given" if number == 0 else "predicted"
            rows.append(
                (
                    drafter,
                    accept_length,
                    f"{cycle_ms:.2f}",
                    f"{printed_ms:.2f}",
                    f"{ours:.2f}",
                    f"{printed:.2f}",
                    error_of(ours, printed),
                    f"{ours * plain_ms / 1e3:.2f}x",
                    kind,
                )
            )
        figures[f"{drafter} drafting ms"] = cycle_ms - plain_ms
    figures["worst cycle error"] = worst
    columns = ("drafter", "accept length", "cycle ms", "paper's ms", "tokens/s", "paper", "error", "speed-up", "row")
    beyond = ", ".join(f"{name} {figures[f'{name} drafting ms']:.1f} ms" for name in _DRAFTERS)
    return StudyReport(
        study="tlt-cycles",
        seed=seed,
        inputs=inputs,
        tables=(ResultTable(title="Qwen2.5-7B, TP 2, batch 1", columns=columns, rows=tuple(rows)),),
        figures=figures,
        findings=(
            "One row per drafter gave its cycle time; EAGLE's and the 0.5B model's other rows are predicted.",
            "HASS and EAGLE-3 are printed once, so their rows predict nothing.",
            f"Beyond a plain step of {plain_ms:.2f} ms a cycle takes: {beyond}.",
        ),
    )
