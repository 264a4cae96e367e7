"""Placement of a group's engines as Ray's actors: Ray itself, a bundle for each engine, and each one's devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vllm_specrollout.cluster.ray.actor import Actor
from vllm_specrollout.config.devices import Devices, shares
from vllm_specrollout.errors import ConfigError

# an actor that is killed takes its processes with it; Ray takes this where it is started, and nowhere else
_LOCAL: dict[str, Any] = {
    "include_dashboard": False,
    "object_store_memory": 1 << 27,
    # Ray runs its workers at a low priority, which on a host of ours alone only gives others the cores
    "_system_config": {"process_group_cleanup_enabled": True, "worker_niceness": 0},
}


@dataclass(frozen=True, slots=True)
class Needs:
    """What each engine of a group is begun with."""

    # module and class of what runs in the actor
    replica: str
    # arguments of vLLM's engine, and of the drafters'
    engine: Mapping[str, Any]
    drafter_engine: Mapping[str, Any]
    # of each engine: its drafter's model, empty where it has none
    drafters: Sequence[str]
    # of each engine; None: Ray's GPUs, or equal shares of the cores where it has none
    devices: Sequence[Devices] | None
    gpus: float | None
    cpus: float
    max_restarts: int


class Placement:
    """The actors of a group.

    Raises:
        ConfigError: drafters cannot run beside engines on GPUs.
    """

    def __init__(self, needs: Needs) -> None:
        self.actors: dict[str, Any] = {}
        """Engine -> its actor."""
        self._bundles: Any = None
        count = len(needs.drafters)
        self._owns_ray = _connect(max(1, round(count * needs.cpus)))
        try:
            # of 2.55, Ray declares no types for this
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0  # type: ignore[no-untyped-call]
            places, gpus = _places(needs, has_gpus)
            bundle = {"CPU": needs.cpus} | ({"GPU": gpus} if gpus else {})
            self._bundles = placement_group([bundle] * count, "PACK")
            for i, drafter in enumerate(needs.drafters):
                self.actors[f"engine-{i}"] = self._begin(needs, i, drafter, None if places is None else places[i], gpus)
        except BaseException:
            self.close()
            raise

    def _begin(self, needs: Needs, index: int, drafter: str, place: Devices | None, gpus: float) -> Any:
        actor: Any = ray.remote(Actor)
        return actor.options(
            num_cpus=needs.cpus,
            num_gpus=gpus,
            max_restarts=needs.max_restarts,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._bundles, index),
            runtime_env={"env_vars": {} if place is None else place.environment},
        ).remote(
            needs.replica,
            dict(needs.engine),
            drafter,
            dict(needs.drafter_engine),
            () if place is None or place.kind != "cpu" else place.numbers,
        )

    def close(self) -> None:
        """End the actors, each with all its processes, and Ray where it was started here."""
        for actor in self.actors.values():
            ray.kill(actor)
        self.actors = {}
        if self._bundles is not None:
            remove_placement_group(self._bundles)
            self._bundles = None
        if self._owns_ray:
            self._owns_ray = False
            ray.shutdown()


def _connect(cpus: int) -> bool:
    """Be connected to Ray; whether it was started for that, on this host."""
    if ray.is_initialized():
        return False
    if os.environ.get("RAY_ADDRESS"):
        ray.init()
        return False
    # what a rollout does is told to nobody
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=cpus, **_LOCAL)
    return True


def _places(needs: Needs, has_gpus: bool) -> tuple[Sequence[Devices] | None, float]:
    """Devices of each engine, None where Ray chooses them, and the GPUs of each that Ray counts."""
    places = needs.devices
    if places is None and not has_gpus:
        places = shares(sorted(os.sched_getaffinity(0)), len(needs.drafters))
    if places is not None:
        gpus, is_cuda = 0.0, any(one.kind == "cuda" for one in places)
    else:
        gpus = float(needs.engine.get("tensor_parallel_size", 1)) if needs.gpus is None else needs.gpus
        is_cuda = gpus > 0
    if is_cuda and any(needs.drafters):
        raise ConfigError("`drafters` run on CPU cores, and these engines on GPUs", "leave `drafters` out")
    return places, gpus
