"""A study's outcome: tables of ours beside theirs, single figures, plain statements."""

from __future__ import annotations

from typing import Annotated

import msgspec

Number = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
"""Of an input: any usual one, and neither nan nor infinite."""
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Cell = str | float


class Inputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a study is told. A comment says of each value where it is from: `text`, the paper prints it; `derived`, it
    follows from printed values alone; `free`, the paper does not give it, so it was fitted or set."""


class ResultTable(msgspec.Struct, frozen=True):
    """Rows of cells under titles."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


class StudyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a study hands back."""

    title: str
    tables: tuple[ResultTable, ...]
    # name -> value, for tests and JSON
    figures: dict[str, float]
    # one sentence each: what was fitted, what is predicted, what the printed model does not yield
    findings: tuple[str, ...]


def error_of(ours: float, theirs: float) -> str:
    """`+3.1 %`."""
    return f"{ours / theirs - 1.0:+.1%}".replace("%", " %")
