"""Actor of a group: one life of a replica. Its process alone knows vLLM; the driver needs none."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import ray

from vllm_specrollout.cluster.reports import Wanted


class Actor:
    """
    Args:
        replica: module and class of what it is, as `package.module:Class`.
        args: of that class.
    """

    def __init__(self, replica: str, *args: Any) -> None:
        module, _, name = replica.partition(":")
        self._own: Any = getattr(import_module(module), name)(*args)

    # answered by the next life, where this one ends; all else fails with it
    @ray.method(max_task_retries=-1)
    async def admit(self, wanted: Wanted) -> tuple[int, int, str]:
        """Version, requests that it runs at once, and Ray's node: hosts may have one name, and containers several."""
        version, places = await self._own.admit(wanted)
        return version, places, str(ray.get_runtime_context().get_node_id())

    async def ask(self, method: str, *args: Any) -> Any:
        """A method of the replica."""
        return await getattr(self._own, method)(*args)

    async def close(self) -> None:
        self._own.close()
