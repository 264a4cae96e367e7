"""One request: which way of drafting is fastest, and do closed formulas say the same?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_specrollout.cluster.simulate.inputs import StudyInputs
from vllm_specrollout.cluster.simulate.one_request import Scene, ahead_speed, coupled_speed
from vllm_specrollout.cluster.simulate.report import Cell, ResultTable, StudyReport
from vllm_specrollout.cluster.simulate.step_line import StepLine
from vllm_specrollout.decoupled.rates import coupled_rate, decoupled_rate

WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
_SCENES = {"large_target": "13 ms target", "small_target": "4 ms target", "cpu_target": "CPU, 16 ms target"}
_MATCHES = ("good_match", "fair_match")
WAYS: dict[str, Callable[[Scene, int, int, np.random.Generator], float]] = {
    "coupled chain": lambda scene, window, tokens, rng: coupled_speed(scene, window, 1, tokens, rng),
    "coupled comb of 2": lambda scene, window, tokens, rng: coupled_speed(scene, window, 2, tokens, rng),
    "ahead": lambda scene, window, tokens, rng: ahead_speed(scene, window, 1, tokens, rng),
    "ahead, 2 exits": lambda scene, window, tokens, rng: ahead_speed(scene, window, 2, tokens, rng),
    "ahead, 3 exits": lambda scene, window, tokens, rng: ahead_speed(scene, window, 3, tokens, rng),
}
"""Name -> tokens per ms of a scene with a window, over so many tokens."""


def scenes_of(inputs: StudyInputs) -> list[Scene]:
    """Each verifier with each match rate."""
    found = []
    for scene, title in _SCENES.items():
        verify_ms, row_ms, draft_ms = inputs.numbers(scene)
        for match in _MATCHES:
            best, two, three = inputs.numbers(match)
            found.append(
                Scene(
                    name=f"{title}, match {best:g}",
                    verify_ms=verify_ms,
                    row_ms=row_ms,
                    draft_ms=draft_ms,
                    branch_share=inputs.number("branch_share"),
                    matches=(best, two, three),
                )
            )
    return found


def closed_speed(way: str, scene: Scene, window: int) -> float | None:
    """Tokens per ms by formula; None: there is none for that way."""
    p = scene.matches[0]
    verifier = StepLine(base=scene.verify_ms, row=scene.row_ms, steep=scene.row_ms)
    drafter = StepLine(base=scene.draft_ms)
    if way == "coupled chain":
        return coupled_rate(drafter, verifier, 1, window, p)
    if way == "ahead":
        return decoupled_rate(drafter, verifier, 1, window, p)
    return None


def run(inputs: StudyInputs, seed: int) -> StudyReport:
    """Every way with its best window in every scene."""
    tokens = int(inputs.number("tokens"))
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float] = {}
    off = 0.0
    for scene in scenes_of(inputs):
        cells: list[Cell] = [scene.name]
        for way, speed in WAYS.items():
            found = {
                window: speed(scene, window, tokens, np.random.default_rng(seed)) * scene.plain_ms for window in WINDOWS
            }
            best = max(found, key=lambda window: found[window])
            figures[f"{scene.name}, {way}"] = found[best]
            cells.append(f"{found[best]:.2f}x (w {best})")
            closed = closed_speed(way, scene, best)
            if closed is not None:
                off = max(off, abs(found[best] / (closed * scene.plain_ms) - 1.0))
        rows.append(tuple(cells))
    figures["worst gap to a formula"] = off
    return StudyReport(
        study="one-request",
        seed=seed,
        inputs=inputs,
        tables=(ResultTable(title="over plain decoding, best window", columns=("scene", *WAYS), rows=tuple(rows)),),
        figures=figures,
        findings=_findings(inputs, figures),
    )


def _findings(inputs: StudyInputs, figures: dict[str, float]) -> tuple[str, ...]:
    names = [scene.name for scene in scenes_of(inputs)]
    loses = [name for name in names if figures[f"{name}, ahead"] < figures[f"{name}, coupled comb of 2"]]
    wins = [
        name
        for name in names
        if max(figures[f"{name}, ahead, {exits} exits"] for exits in (2, 3)) > figures[f"{name}, coupled comb of 2"]
    ]
    return (
        "All inputs are free: the table compares ways of drafting, and no paper.",
        f"A stream alone loses to a coupled comb in {len(loses)} of {len(names)} scenes; with exits it wins in"
        f" {len(wins)} of {len(names)}.",
        "Coupled chains and streams are at most"
        f" {figures['worst gap to a formula']:.1%} off their closed formulas (decoupled/rates.py, timetable.py).",
    )
