"""When drafters are left alone because drafting has not paid for a while. Counted in engine steps; keeps no clock."""

from __future__ import annotations

PATIENCE = 4
"""Asked steps in a row that may fail to pay before the first pause."""
FIRST_PAUSE, LONGEST_PAUSE = 4, 64
"""Steps without drafts; each further pause is twice as long, and one try lies between two."""


class Backoff:
    """Pauses drafting: after some steps in a row that did not pay, for ever longer, until one pays."""

    def __init__(self) -> None:
        self._failed = 0
        self._pause = FIRST_PAUSE
        # the first step that may be asked again
        self._until = 0

    def is_paused(self, step: int) -> bool:
        """Whether this engine step goes without drafts."""
        return step < self._until

    def steps_left(self, step: int) -> int:
        """How many steps from this one on go without drafts."""
        return max(self._until - step, 0)

    def asked(self, step: int, paid: bool) -> None:
        """Drafters were asked in this step.

        Args:
            paid: whether that is expected to pay, the asking counted.
        """
        if paid:
            self._failed, self._pause = 0, FIRST_PAUSE
            return
        self._failed += 1
        if self._failed >= PATIENCE:
            self._until = step + 1 + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
