"""What trainers written for an earlier vLLM say when they pause an engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_DROPPED = "wait_for_inflight_requests"


def accept_dropped_keyword(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `AsyncLLM.pause_generation`: the keyword means what it meant in vLLM 0.31, where it was deprecated."""
    if _DROPPED in inspect.signature(original).parameters:
        return original

    @functools.wraps(original)
    async def pause_generation(self: Any, *, wait_for_inflight_requests: bool | None = None, **kwargs: Any) -> None:
        if wait_for_inflight_requests:
            kwargs["mode"] = "wait"
        await original(self, **kwargs)

    return pause_generation
