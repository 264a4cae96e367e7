"""An index that says which threads called it."""

from __future__ import annotations

import threading
from typing import Any

from vllm_specrollout._core import HistoryIndex


class OwnedIndex:
    """The core's index, which has no lock: whoever calls it while another thread is in a call is told so."""

    broken: list[str] = []

    def __init__(self, **settings: int) -> None:
        self.core, self._inside, self.threads = HistoryIndex(**settings), 0, list[int]()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.core, name)
        if not callable(value):
            return value

        def call(*args: Any, **more: Any) -> Any:
            own = threading.get_ident()
            if self._inside not in (0, own):
                self.broken.append(name)
            self._inside = own
            try:
                return value(*args, **more)
            finally:
                if self.threads[-1:] != [own]:
                    self.threads.append(own)
                self._inside = 0

        return call
