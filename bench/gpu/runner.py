"""What measures the rows of a part, in its child."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class NotMeasured(Exception):
    """This row cannot be had, and the others still can."""


class Runner(AbstractContextManager["Runner"], Protocol):
    """Made once, with the part's setup and the parameters of the rows that it will be asked for."""

    def __init__(self, setup: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None: ...

    def measure(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The row's values, of JSON types; `is_right` among them where there was something to check.

        Raises:
            NotMeasured: see there. Anything else ends the process.
        """
        ...
