"""Where the engine core is made: a scheduler that has questions to the workers is told how to ask them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def introduce_workers(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of `EngineCore` that is called once, and has its executor and its scheduler when it is done."""

    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        meet_workers = getattr(self.scheduler, "meet_workers", None)
        if meet_workers is not None:
            meet_workers(self.model_executor)

    return initialize
