"""Placement of a group's engines as Ray's actors: Ray itself, a bundle for each engine, and each one's devices."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vllm_specrollout.cluster.batch import GroupError
from vllm_specrollout.cluster.driver import EngineLost
from vllm_specrollout.cluster.ray.actor import Actor
from vllm_specrollout.config.arguments import check_answers, check_devices, check_folder, count_gpus
from vllm_specrollout.config.devices import Devices
from vllm_specrollout.errors import ConfigError, SpecRolloutError, logger

_KINDS = ("CPU", "GPU")
_NO_GPU = "leave it out: then engines run on cores"
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
    # folders or names, of the drafters as well
    models: Sequence[str]
    count: int
    # of each engine; None: Ray's GPUs, or equal shares of its host's cores where Ray has none
    devices: Sequence[Devices] | None
    gpus: float | None
    cpus: float
    # times that an engine which was admitted is begun anew
    max_restarts: int

    @property
    def ranks(self) -> int:
        """Of each engine."""
        return int(self.engine.get("tensor_parallel_size", 1)) * int(self.engine.get("pipeline_parallel_size", 1))

    def environment(self, index: int) -> dict[str, str]:
        """That an engine's process sees beside what Ray sets."""
        if self.devices is None:
            return {}
        own = self.devices[index]
        return own.environment(self.ranks if own.kind == "cpu" else 1)


class Placement:
    """The actors of a group, and its calls of them (`driver.Lines`), awaited in the driver's loop.

    Raises:
        ConfigError: no cluster of Ray is there, or what is there can never have these engines.
    """

    def __init__(self, needs: Needs) -> None:
        self.actors: dict[str, Any] = {}
        """Engine -> its actor."""
        self._bundles: Any = None
        self._owns_ray = _connect(needs)
        try:
            # of 2.55, Ray declares no types for this
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
            if len(nodes) == 1:
                check_here(needs)
            has_gpus, count = any(node.get("GPU") for node in nodes), needs.count
            gpus = _gpus(needs, has_gpus=has_gpus)
            bundle = {"CPU": needs.cpus} | ({"GPU": gpus} if gpus else {})
            _check_room(bundle, count, nodes)
            self._bundles = placement_group([bundle] * count, "PACK")
            # ranks that share their host's cores; 0: an engine has other devices
            sharers = 0 if has_gpus or needs.devices is not None else needs.ranks
            actor: Any = ray.remote(Actor)
            for i in range(count):
                placed = actor.options(
                    num_cpus=needs.cpus,
                    num_gpus=gpus,
                    max_restarts=needs.max_restarts,
                    max_task_retries=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._bundles, i),
                    runtime_env={"env_vars": needs.environment(i)},
                )
                self.actors[f"engine-{i}"] = placed.remote(needs.replica, i, sharers, dict(needs.engine))
        except BaseException:
            self.close()
            raise

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

    async def call(self, engine: str, method: str, *args: Any) -> Any:
        try:
            return await self._ask(engine, method, *args)
        except RayActorError as error:
            # the last line of an actor's end is what ended it
            *_, said = [line.strip() for line in f"{type(error).__name__}\n{error}".splitlines() if line.strip()]
            raise EngineLost(said) from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, SpecRolloutError):
                raise cause from None
            raise GroupError(f"an engine refused: {type(cause).__name__}: {cause}", "see Ray's logs") from error

    def send(self, engine: str, method: str, *args: Any) -> None:
        self._ask(engine, method, *args)

    def end(self, engine: str) -> None:
        ray.kill(self.actors[engine], no_restart=False)

    def _ask(self, engine: str, method: str, *args: Any) -> Any:
        actor = self.actors[engine]
        return actor.admit.remote(*args) if method == "admit" else actor.ask.remote(method, *args)

    def close(self) -> None:
        """End the actors, each with all its processes, and Ray where it was started here."""
        for actor in self.actors.values():
            ray.kill(actor)
        if self._bundles is not None:
            remove_placement_group(self._bundles)
            self._bundles = None
        if self._owns_ray:
            self._owns_ray = False
            ray.shutdown()


def _total(resources: Sequence[Mapping[str, float]]) -> str:
    """Of all of them, for a person."""
    return " and ".join(f"{sum(one.get(kind, 0.0) for one in resources):g} {kind}" for kind in _KINDS)


def check_here(needs: Needs) -> None:
    """Where all engines are on this host, what it cannot have is known before anything is begun.

    Raises:
        ConfigError: no such model, core or GPU.
    """
    for i, model in enumerate(needs.models):
        check_folder(model, "drafters" if i else "model")
    check_devices(needs.devices)


def _connect(needs: Needs) -> bool:
    """Be connected to Ray; whether it was started for that, on this host.

    Raises:
        ConfigError: the cluster that is to be used is no more; or this host cannot have these engines.
    """
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS") or _running()
    if address and address != "local":
        if ":" in address:
            check_answers("RAY_ADDRESS", address)
        ray.init(address)
        logger.info("Spec rollout: the group joins the Ray that runs at %s", address)
        return False
    check_here(needs)
    _check_counts(needs, len(os.sched_getaffinity(0)))
    # what a rollout does is told to nobody
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=max(os.cpu_count() or 1, math.ceil(needs.count * needs.cpus)), **_LOCAL)
    return True


def _running() -> str:
    """Address of the Ray that `ray start` has begun on this host; empty: none answers."""
    try:
        address = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster").read_text("ascii").strip()
        check_answers("ray_current_cluster", address)  # that of one which was killed is still there
    except (OSError, ValueError):
        return ""
    return address


def _check_counts(needs: Needs, cores: int) -> None:
    """What a Ray that is started here could never have.

    Raises:
        ConfigError: more engines or cores than this host has, or GPUs where it has none.
    """
    has_gpus = count_gpus() != 0
    if needs.gpus and not has_gpus:
        raise ConfigError(f"`gpus` is {needs.gpus}, and this host has no GPU", _NO_GPU)
    if needs.cpus > cores:
        raise ConfigError(f"`cpus` is {needs.cpus}, and this host has {cores} cores", "ask for less for each engine")
    if needs.devices is None and not has_gpus and needs.count * needs.ranks > cores:
        cause = f"`engines` is {needs.count}, with {needs.ranks} rank(s) each, and this host has {cores} cores"
        raise ConfigError(cause, "begin fewer, or name cores that they share, as devices=['cpu:0', 'cpu:0']")


def _check_room(bundle: Mapping[str, float], count: int, nodes: Sequence[Mapping[str, float]]) -> None:
    """What the whole cluster could not meet if all of it were free is waited for by nobody.

    Raises:
        ConfigError: it could not.
    """
    ranks, most = bundle.get("GPU", 0.0), max(node.get("GPU", 0.0) for node in nodes)
    if ranks > most:
        cause = f"an engine has {ranks:g} GPUs, and no host of Ray's has more than {most:g}"
        raise ConfigError(cause, "an engine of a group is on one host: give it fewer ranks")
    if any(count * bundle.get(kind, 0.0) > sum(node.get(kind, 0.0) for node in nodes) for kind in _KINDS):
        cause = f"the group needs {_total([bundle] * count)} of Ray, which has {_total(nodes)} in all"
        raise ConfigError(cause, "begin fewer engines, or start Ray on more hosts")


def _gpus(needs: Needs, *, has_gpus: bool) -> float:
    """Of each engine, that Ray counts.

    Raises:
        ConfigError: GPUs are wanted where Ray has none.
    """
    if needs.gpus and needs.devices is None and not has_gpus:
        raise ConfigError(f"`gpus` is {needs.gpus}, and Ray counts no GPU", _NO_GPU)
    if needs.devices is not None or not has_gpus:
        return 0.0
    return float(needs.ranks) if needs.gpus is None else needs.gpus
