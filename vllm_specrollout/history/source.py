"""A file of a store's directory, as far as it was read: which of its records are which answers. Carriers only."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from vllm_specrollout.history import log
from vllm_specrollout.history.table import Place

NO_ROW = -1
"""Of a record that is no answer, or one that was dropped."""


class Located(NamedTuple):
    """An answer that can be read whatever happens to the store meanwhile."""

    place: Place
    source: log.Reader | bytes


class Source:
    """One file, as far as it was read."""

    def __init__(self, reader: log.Reader | None) -> None:
        self.reader = reader
        # [sequence number] row of that answer, or NO_ROW
        self.rows = array("i")
        self.num_tokens = 0
        """Of all answers in it, dropped ones too."""
        self.reward_bytes = 0
        """Of rewards that stand beside their answers; written anew, a file has none."""

    def set_row(self, sequence: int, row: int) -> None:
        if sequence >= len(self.rows):
            self.rows.extend([NO_ROW] * (sequence + 1 - len(self.rows)))
        self.rows[sequence] = row

    def row(self, sequence: int) -> int:
        return self.rows[sequence] if sequence < len(self.rows) else NO_ROW
