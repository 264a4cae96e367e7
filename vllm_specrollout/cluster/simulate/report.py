"""What a study hands back: tables of ours beside theirs, single figures, plain statements, and curves for a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_specrollout.cluster.simulate.inputs import StudyInputs

Cell = str | float | int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTable:
    """Rows of cells under titles."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of the study's picture."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    # drawn as points: what the paper prints
    is_printed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyReport:
    """A study's outcome."""

    study: str
    seed: int
    inputs: StudyInputs
    tables: tuple[ResultTable, ...]
    # name -> value, for tests and JSON
    figures: Mapping[str, float]
    # one sentence each: what was fitted, what is predicted, what the printed model does not yield
    findings: tuple[str, ...]
    curves: tuple[Curve, ...] = ()
    # what stands along the axes of the picture
    axes: tuple[str, str] = field(default=("", ""))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        inputs = self.inputs
        return {
            "study": self.study,
            "title": inputs.title,
            "seed": self.seed,
            "inputs": [asdict(given) for given in inputs.inputs.values()],
            "targets": [asdict(given) for given in inputs.targets.values()],
            "tables": [asdict(table) for table in self.tables],
            "figures": dict(self.figures),
            "findings": list(self.findings),
        }


def error_of(ours: float, theirs: float) -> str:
    """`+3.1 %`."""
    return f"{ours / theirs - 1.0:+.1%}".replace("%", " %")
