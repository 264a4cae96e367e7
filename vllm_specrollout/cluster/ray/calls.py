"""Calls of a group's actors (`driver.Lines`), awaited in the driver's loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from vllm_specrollout.cluster.batch import GroupError
from vllm_specrollout.cluster.driver import EngineLost
from vllm_specrollout.errors import SpecRolloutError


class Calls:
    """
    Args:
        actors: by the names of their engines.
    """

    def __init__(self, actors: Mapping[str, Any]) -> None:
        self._actors = actors

    async def call(self, engine: str, method: str, *args: Any) -> Any:
        try:
            return await self._ask(engine, method, *args)
        except RayActorError as error:
            raise EngineLost(_said(error)) from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, SpecRolloutError):
                raise cause from None
            raise GroupError(f"an engine refused: {type(cause).__name__}: {cause}", "see Ray's logs") from error

    def send(self, engine: str, method: str, *args: Any) -> None:
        self._ask(engine, method, *args)

    def end(self, engine: str) -> None:
        ray.kill(self._actors[engine], no_restart=False)

    def _ask(self, engine: str, method: str, *args: Any) -> Any:
        actor = self._actors[engine]
        return actor.admit.remote(*args) if method == "admit" else actor.ask.remote(method, *args)


def _said(error: Exception) -> str:
    """The last line of an actor's end, where what ended it is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
