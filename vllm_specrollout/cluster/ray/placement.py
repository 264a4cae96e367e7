"""Placement of a group's engines as Ray's actors: Ray itself, a bundle for each engine, and each one's devices."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vllm_specrollout.cluster.batch import GroupError
from vllm_specrollout.cluster.ray.actor import Actor
from vllm_specrollout.config.devices import Devices, shares
from vllm_specrollout.errors import ConfigError

logger = logging.getLogger("vllm.specrollout")

_SAY_S = 10.0
"""Seconds that a group may wait for its place before the log says so."""
# an actor that is killed takes its processes with it; Ray takes this where it is started, and nowhere else
_LOCAL: dict[str, Any] = {
    "include_dashboard": False,
    "object_store_memory": 1 << 27,
    "_system_config": {
        "process_group_cleanup_enabled": True,
        # Ray runs its workers at a low priority, which on a host of ours alone only gives others the cores
        "worker_niceness": 0,
        # a death is told at once, not a second later with what is known of it by then
        "timeout_ms_task_wait_for_death_info": 50,
    },
}


@dataclass(frozen=True, slots=True)
class Needs:
    """What each engine of a group is begun with."""

    # module and class of what runs in the actor
    replica: str
    # arguments of vLLM's engine
    engine: Mapping[str, Any]
    count: int
    # whether a drafter may run beside each engine
    has_drafters: bool
    # of each engine, and of its drafter; None: Ray's GPUs, or equal shares of the cores where it has none, which an
    # engine and its drafter share
    devices: Sequence[Devices] | None
    drafter_devices: Sequence[Devices] | None
    gpus: float | None
    cpus: float
    max_restarts: int

    @property
    def ranks(self) -> int:
        """Of each engine."""
        return int(self.engine.get("tensor_parallel_size", 1)) * int(self.engine.get("pipeline_parallel_size", 1))


@dataclass(frozen=True, slots=True)
class _Place:
    """Of one engine and its drafter."""

    # that the actor's process sees; None: as Ray sets it
    environment: Mapping[str, str]
    # as the actor's process counts them
    drafter: Sequence[str]
    # that Ray counts
    gpus: float


class Placement:
    """The actors of a group.

    Raises:
        ConfigError: drafters cannot run where they are to.
    """

    def __init__(self, needs: Needs) -> None:
        self.actors: dict[str, Any] = {}
        """Engine -> its actor."""
        self.drafters: dict[str, Sequence[str]] = {}
        """Engine -> devices of its drafter, as its process counts them."""
        self._bundles: Any = None
        self._owns_ray = _connect(max(os.cpu_count() or 1, math.ceil(needs.count * needs.cpus)))
        try:
            # of 2.55, Ray declares no types for this
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0  # type: ignore[no-untyped-call]
            places = _places(needs, has_gpus)
            bundles = [{"CPU": needs.cpus} | ({"GPU": place.gpus} if place.gpus else {}) for place in places]
            self._bundles = placement_group(bundles, "PACK")
            for i, place in enumerate(places):
                self.actors[f"engine-{i}"] = self._begin(needs, i, place)
                self.drafters[f"engine-{i}"] = place.drafter
        except BaseException:
            self.close()
            raise

    def _begin(self, needs: Needs, index: int, place: _Place) -> Any:
        actor: Any = ray.remote(Actor)
        return actor.options(
            num_cpus=needs.cpus,
            num_gpus=place.gpus,
            max_restarts=needs.max_restarts,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._bundles, index),
            runtime_env={"env_vars": dict(place.environment)},
        ).remote(needs.replica, dict(needs.engine))

    def wait(self, most_s: float) -> None:
        """Until Ray has set aside what the actors need.

        Raises:
            GroupError: it has not.
        """
        if self._bundles.wait(min(most_s, _SAY_S)):
            return
        wanted, free = _total(self._bundles.bundle_specs), _total([ray.available_resources()])  # type: ignore[no-untyped-call]
        cause = f"the group needs {wanted} of Ray, which has {free} free"
        logger.warning("Spec rollout: %s; it is waited for", cause)
        if not self._bundles.wait(max(most_s - _SAY_S, 0.0)):
            raise GroupError(f"{cause}, and had no more for {most_s:.0f} s", "close what holds it, or ask for less")

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


def _total(resources: Sequence[Mapping[str, float]]) -> str:
    """Of all of them, for a person."""
    return " and ".join(f"{sum(one.get(kind, 0.0) for one in resources):g} {kind}" for kind in ("CPU", "GPU"))


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


def _places(needs: Needs, has_gpus: bool) -> list[_Place]:
    count, devices = needs.count, needs.devices
    if devices is None and not has_gpus:
        devices = shares(sorted(os.sched_getaffinity(0)), count)
    if devices is not None:
        drafters: Sequence[Devices | None] = needs.drafter_devices or [None] * count
        return [
            _named(place, drafter if needs.has_drafters else None, needs)
            for place, drafter in zip(devices, drafters, strict=True)
        ]
    ranks = float(needs.ranks) if needs.gpus is None else needs.gpus
    if needs.has_drafters and ranks != int(ranks):
        raise ConfigError(
            f"`gpus` is {ranks}, and a drafter runs beside each engine",
            "give each engine whole GPUs; a drafter has one",
        )
    # the GPU behind those of the engine's ranks
    drafter = [f"cuda:{int(ranks)}"] if needs.has_drafters else []
    return [_Place({}, drafter, ranks + len(drafter))] * count


def _named(place: Devices, drafter: Devices | None, needs: Needs) -> _Place:
    """Devices that were named, or are shares of the host's."""
    if place.kind == "cpu":
        own = drafter or place
        beside = [f"{own.kind}:{number}" for number in own.numbers] if needs.has_drafters else []
        return _Place(place.environment(needs.ranks), beside, 0.0)
    if needs.has_drafters and drafter is None:
        cause = "`devices` names GPUs of the engines, and none of their drafters"
        raise ConfigError(cause, 'name those as well, as in drafter_devices=["cuda:2", "cuda:3"]')
    if drafter is None or drafter.kind == "cpu":
        return _Place(place.environment(), [] if drafter is None else [f"cpu:{n}" for n in drafter.numbers], 0.0)
    first, both = len(place.numbers), Devices("cuda", (*place.numbers, *drafter.numbers))
    names = ",".join(str(first + i) for i in range(len(drafter.numbers)))
    return _Place(both.environment(), [f"cuda:{names}"], 0.0)
