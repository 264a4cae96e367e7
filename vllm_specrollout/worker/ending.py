"""How a process of ours is told to end: SIGTERM, from whoever began it."""

from __future__ import annotations

import signal


class Ending:
    """From its making on, SIGTERM ends the process: at once while it starts, and between two turns once it works.

    Within a turn nothing is raised: what a drafter raises is contained there, this as well, and the process would stay.
    """

    def __init__(self) -> None:
        self._is_working = False
        self.is_asked = False
        signal.signal(signal.SIGTERM, self._take)

    def wait_for_turn(self) -> None:
        """From now on SIGTERM only sets `is_asked`: whoever has this asks it between two turns."""
        self._is_working = True

    def _take(self, *_: object) -> None:
        self.is_asked = True
        if not self._is_working:
            raise SystemExit(0)
