"""How a process of ours is told to end: SIGTERM, from whoever began it."""

from __future__ import annotations

import signal


class Ending:
    """From its making on, SIGTERM ends the process: at once while it starts, and between two turns once it works.

    Within a turn nothing is raised: what a drafter raises is contained there, this as well, and the process would stay.
    """

    def __init__(self) -> None:
        self.is_working = False
        """Whether whoever has this asks `is_asked` now and then."""
        self.is_asked = False
        signal.signal(signal.SIGTERM, self._take)

    def _take(self, *_: object) -> None:
        self.is_asked = True
        if not self.is_working:
            raise SystemExit(0)
