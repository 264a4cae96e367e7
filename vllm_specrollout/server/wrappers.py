"""Small wrappers of vLLM's methods, rebound by `patches/`: how it pauses, stops at strings, and shows workers."""

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


def stop_at_once(original: Callable[..., str | None]) -> Callable[..., str | None]:
    """Wrap a detokenizer's `update`: where there are stop strings, a step's tokens are looked at one by one.

    Before vLLM 0.32 its front end keeps the tokens that a step brings behind the one that completes a stop string.
    The list of new tokens is cut in place behind the one that completes a stop string: its owner, vLLM's output
    processor, goes on with that list.
    """

    @functools.wraps(original)
    def update(self: Any, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        if not self.stop or len(new_token_ids) < 2:
            return original(self, new_token_ids, stop_terminated)
        last = len(new_token_ids) - 1
        for place, token in enumerate(list(new_token_ids)):
            found = original(self, [token], stop_terminated and place == last)
            if found is not None:
                del new_token_ids[place + 1 :]
                return found
        return None

    return update


def forget_what_was_cut(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a logprobs processor's `update_from_output`: tokens that `stop_at_once` has cut off have no logprobs."""

    @functools.wraps(original)
    def update_from_output(self: Any, output: Any) -> None:
        logprobs, kept = output.new_logprobs, len(output.new_token_ids)
        if logprobs is not None and len(logprobs.logprobs) > kept:
            output.new_logprobs = logprobs.slice_request(0, kept)
        original(self, output)

    return update_from_output


def introduce_workers(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of `EngineCore` that is called once, and has its executor and its scheduler when it is done."""

    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        meet_workers = getattr(self.scheduler, "meet_workers", None)
        if meet_workers is not None:
            meet_workers(self.model_executor)

    return initialize
