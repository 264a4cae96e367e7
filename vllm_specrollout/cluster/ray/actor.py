"""Actor of a group: one life of a replica. Its process alone knows vLLM; the driver needs none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import ray
from ray.util import get_current_placement_group, placement_group_table

from vllm_specrollout.cluster.batch import BeginError
from vllm_specrollout.cluster.reports import Wanted
from vllm_specrollout.config.arguments import check_folder
from vllm_specrollout.config.devices import shares
from vllm_specrollout.errors import logger

_HINT = "\n\nhint: "


class Actor:
    """
    Args:
        replica: module and class of what it is, as `package.module:Class`.
        index: of its bundle in the group's placement.
        ranks: that share its cores; 0: its devices are given.
        engine: arguments of that class.
    """

    def __init__(self, replica: str, index: int, ranks: int, engine: Mapping[str, Any], *args: Any) -> None:
        self._own: Any = None
        # what keeps the replica from being begun is told to whoever asks: of an error here, Ray begins it anew
        self._wrong = ""
        try:
            # the driver's host may know nothing of this one's files
            check_folder(engine["model"])
            if ranks:
                os.environ |= _own_cores(index, ranks)
            module, _, name = replica.partition(":")
            self._own = getattr(import_module(module), name)(engine, *args)
        except Exception as error:
            logger.exception("Spec rollout: an engine cannot be begun")
            self._wrong = f"{type(error).__name__}: {str(error).partition(_HINT)[0]}"

    # answered by the next life, where this one ends; all else fails with it
    @ray.method(max_task_retries=-1)
    async def admit(self, wanted: Wanted) -> tuple[int, int, str]:
        """Version, requests that it runs at once, and Ray's node: hosts may have one name, and containers several.

        Raises:
            BeginError: there is no engine.
        """
        if self._wrong:
            raise BeginError(self._wrong, "`LLM(...)` with the same arguments says more; see Ray's logs")
        version, places = await self._own.admit(wanted)
        return version, places, str(ray.get_runtime_context().get_node_id())

    async def ask(self, method: str, *args: Any) -> Any:
        """A method of the replica."""
        return await getattr(self._own, method)(*args)

    async def close(self) -> None:
        if self._own is not None:
            self._own.close()


def _own_cores(index: int, ranks: int) -> dict[str, str]:
    """What binds this process to its share of its host's cores: of a group, the engines there have equal ones."""
    here, table = ray.get_runtime_context().get_node_id(), placement_group_table(get_current_placement_group())
    beside = sorted(bundle for bundle, node in table["bundles_to_node_id"].items() if node == here)
    return shares(sorted(os.sched_getaffinity(0)), len(beside))[beside.index(index)].environment(ranks)
