"""Models that draft in processes of their own, as the target's runner sees them: begun with the engine, or attached.

With `placement: auto` a plan says on V1 whether a model drafts in the target's steps, beside them, or nowhere; on V2
it drafts in both places. A drafter elsewhere is told how tokens of the target's requests are sampled, and their seeds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from vllm_specrollout.cluster.child import Command, DrafterProcess, WarmDrafter
from vllm_specrollout.cluster.link import SamplingOf
from vllm_specrollout.cluster.mail import MailClient
from vllm_specrollout.cluster.messages import Sampling
from vllm_specrollout.cluster.planner import Plan, plan_engine
from vllm_specrollout.cluster.profiles import DrafterProfile, Learning, kept, of_engine, save
from vllm_specrollout.cluster.rates import Mode
from vllm_specrollout.config import DECOUPLED_SOURCES, SpecRolloutConfig
from vllm_specrollout.config.devices import parse_devices, shared
from vllm_specrollout.config.drafters import SINGLE, StartedDrafter
from vllm_specrollout.drafters.decoupled import DecoupledDrafter, connect
from vllm_specrollout.errors import UnsupportedError, logger
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.types import DraftLimits, RequestBatch, StepPlan, TreeBatch
from vllm_specrollout.worker.common import config_of, is_first_rank
from vllm_specrollout.worker.models.drafter import ModelDrafter
from vllm_specrollout.worker.profiling import key_of

SHARE: dict[str, Any] = {
    "enable_sleep_mode": True,
    "kv_cache_memory_bytes": 2 << 30,
    # vLLM looks whether so much is free, and takes what is said above
    "gpu_memory_utilization": 0.01,
    # a warm drafter has b_max requests, each with some branches; more seats take memory for logits
    "max_num_seqs": 64,
}
"""What a drafter takes of its engine's GPU, where nothing else is said: some 2 to 3 GB with half a billion weights."""
START_S = 180.0
"""Seconds that the engine's start waits for drafters; until they are there, requests decode plainly."""
_POLL_S = 0.02  # while the engine starts
_WINDOW = 4  # of a drafter of which nothing is known
_PLACES = {
    Mode.PLAIN: "nowhere",
    Mode.OWN: "nowhere",
    Mode.COUPLED: "in the target's steps",
    Mode.DECOUPLED: "beside them",
}


def sampling_on_v1(runner: Any) -> SamplingOf:
    """What our V1 runner knows of its requests."""

    def sampling(request_id: str) -> Sampling:
        params = runner.requests[request_id].sampling_params
        if runner.book.get(runner.requests[request_id]).is_greedy:
            return Sampling(0.0)
        return Sampling(params.temperature, max(params.top_k, 0), params.top_p, params.min_p, params.seed)

    return sampling


def sampling_on_v2(runner: Any) -> SamplingOf:
    """What our V2 runner knows of its requests: vLLM's own copies on the host, so no step waits for the device."""

    def sampling(request_id: str) -> Sampling:
        row, states = runner.req_states.req_id_to_index[request_id], runner.sampler.sampling_states
        temperature, top_k = float(states.temperature.np[row]), int(states.top_k.np[row])
        if temperature == 0.0:
            return Sampling(0.0)
        # vLLM writes the whole vocabulary where a request has no such limit
        top_k = 0 if top_k == states.vocab_size else top_k
        seed = int(states.seeds.np[row : row + 1].astype(np.int64)[0])
        return Sampling(temperature, top_k, float(states.top_p.np[row]), float(states.min_p.np[row]), seed)

    return sampling


class LinkCounter(Listener):
    """Counts for /metrics what became of drafters elsewhere."""

    def __init__(self, drafter: DecoupledDrafter, metrics: Metrics) -> None:
        self._drafter, self._metrics = drafter, metrics
        self._told = (0, 0)

    def planned(
        self,
        batch: RequestBatch,
        limits: DraftLimits,
        proposals: Sequence[TreeBatch],
        plan: StepPlan,
        draft_ms: float,
    ) -> None:
        alive, trees, wasted = self._drafter.totals()
        self._metrics.elsewhere(alive, trees - self._told[0], wasted - self._told[1])
        self._told = (trees, wasted)


def begin(runner: Any, sampling: SamplingOf) -> DecoupledDrafter | None:
    """Start what the configuration asks for; None: no drafter elsewhere is wanted, or another rank drafts.

    They get ready while the target's weights are loaded.

    Args:
        runner: our V1 or V2 runner.
        sampling: how its requests are sampled.
    """
    vllm_config = runner.vllm_config
    config = config_of(vllm_config)
    if not config.is_decoupled or not is_first_rank():
        return None
    own = config.decoupled
    drafter = DecoupledDrafter(
        sampling,
        config.sources.index(DECOUPLED_SOURCES[0]),
        vocab_size=vllm_config.model_config.get_vocab_size(),
        window=own.window or _WINDOW,
        fan_out=own.fan_out,
        connect=functools.partial(connect, key_file=own.key_file),
    )
    plans = planned(vllm_config)
    runner.placed = Mode.DECOUPLED  # where a model drafts that might in two places
    if config.coupled_model is not None and not vllm_config.use_v2_model_runner:
        runner.placed = _placed(plans.get(config.coupled_model["model"]))
    is_apart = runner.placed is Mode.DECOUPLED
    if own.address and is_apart:
        drafter.link(SINGLE, MailClient(own.address, key_file=own.key_file))
    for started in config.begun:
        if started.name == SINGLE and not is_apart:
            continue
        ahead, _ = plans.get(started.model, (None, None))
        process = DrafterProcess(_command(started, vllm_config))
        window = own.window or (_WINDOW if ahead is None else ahead.window)
        drafter.link(started.name, MailClient(process.command.address), process, window=window)
        if ahead is not None:
            logger.info(
                "Spec rollout: drafter `%s` is planned with a window of %d: %.2f tokens a step, %.2f times without",
                *(started.name, window, ahead.tokens_per_step, ahead.gain),
            )  # fmt: skip
    return drafter


def warm(runner: Any, model: str, devices: Sequence[str], engine_args: Mapping[str, Any]) -> WarmDrafter:
    """A drafter beside this engine, for others to attach; its engine is like this one's where nothing else is said.

    Args:
        devices: empty: this engine's own, on which the drafter has a share.

    Raises:
        ConfigError: something cannot be used.
    """
    places = tuple(devices) or shared(runner.device.type, runner.device.index or 0)
    own = SHARE if any(place.startswith("cuda") for place in places) else {}
    given = StartedDrafter(model=model, devices=places, engine_args={**own, **engine_args})
    found = WarmDrafter(_command(given, runner.vllm_config))
    if runner.device.type == "cpu":
        _wait_asleep()
    return found


def _wait_asleep() -> None:
    """This process waits for its next call without its core. vLLM's worker looks for one all the time, for a second
    behind each call, and a group calls more often: a drafter on the same core got 2 % of it."""
    for spinner in gc.get_objects():
        if type(spinner).__name__ == "SpinCondition" and spinner.is_reader:
            spinner.busy_loop_s = 0.0


def attached(runner: Any) -> DecoupledDrafter:
    """What further drafters are attached to.

    Raises:
        UnsupportedError: none can be.
    """
    drafter = getattr(runner, "remote", None)
    if drafter is None:
        raise UnsupportedError(
            "no drafter can be attached to this engine: its `placement` is `coupled`",
            'start it with {"placement": "decoupled"}; that takes no drafter at first',
        )
    if drafter not in runner.spec_rollout.all_drafters():
        raise UnsupportedError(
            "drafters elsewhere are switched off in this engine, since a fault of ours was met",
            "see its log, and report it",
        )
    return drafter


def keep_off(config: SpecRolloutConfig) -> None:
    """Leave the drafters' cores to them: threads of two engines on one core wait for each other in every product."""
    if config.placement == "decoupled" and (own := own_cores(config, os.sched_getaffinity(0))):
        use_cores(own)


def own_cores(config: SpecRolloutConfig, cores: set[int]) -> set[int]:
    """Those that the drafters leave to the target.

    Empty where nothing is to be moved: the user has bound this engine's threads, the drafters have no cores of their
    own, or none would be left.
    """
    devices = [parse_devices("devices", one) for started in config.begun for one in started.devices]
    theirs = {core for one in devices if one.kind == "cpu" for core in one.numbers}
    bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    return cores - theirs if config.is_decoupled and theirs & cores and bound in ("auto", "nobind") else set()


def cores_of_process() -> set[int]:
    """Those that any of its threads may use."""
    return set().union(*(os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")))


def use_cores(own: set[int]) -> None:
    """Move all threads of this process to these cores, and compute with as many."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), own)
    # vLLM puts something else in the place of `torch.set_num_threads`
    torch._C.set_num_threads(len(own))


def join(runner: Any) -> None:
    """They draft from now on. Waits until all are there, or take too long: the engine starts either way."""
    drafter: DecoupledDrafter | None = runner.remote
    if drafter is None:
        return
    runner.spec_rollout.replace_drafters([*runner.spec_rollout.drafters, drafter])
    runner.spec_rollout.listeners.append(LinkCounter(drafter, runner.metrics))
    config, keep = config_of(runner.vllm_config), _keeper(runner.vllm_config)
    runner.spec_rollout.listeners.append(Learning(drafter.links, keep))
    if isinstance(runner.model_drafter, ModelDrafter) and runner.placed is not Mode.COUPLED:
        runner.model_drafter.is_resting = True
        if runner.placed is Mode.DECOUPLED and (free := own_cores(config, cores_of_process())):
            use_cores(free)
    begin_s = time.monotonic()
    while missing := [link for link in drafter.links.values() if not link.is_there]:
        drafter.receive()
        is_hopeless = all(link.process is not None and not link.process.is_alive for link in missing)
        if time.monotonic() - begin_s > START_S or is_hopeless:
            logger.warning(
                "Spec rollout: decoupled drafters are not there after %.0f s: %s; until they are, requests go without"
                " their drafts",
                time.monotonic() - begin_s,
                ", ".join(link.name for link in missing),
            )
            return
        time.sleep(_POLL_S)


def _keeper(vllm_config: Any) -> Callable[[DrafterProfile], None]:
    """Keeps what is learned of drafters, for engines that start later."""
    if config_of(vllm_config).profile == "off":
        return lambda profile: None
    key, name = key_of(vllm_config), vllm_config.model_config.model

    def keep(profile: DrafterProfile) -> None:
        save(replace(profile, key=key, target=name, verify={key.tensor_parallel: profile.verify[1]}))

    return keep


def planned(vllm_config: Any) -> dict[str, tuple[Plan, Plan]]:
    """Model -> (the best plan with it on a device of its own, the best of all), of those that are known beside this."""
    if config_of(vllm_config).profile == "off":
        return {}
    known, batch = of_engine(kept(), key_of(vllm_config)), vllm_config.scheduler_config.max_num_seqs
    return {one.drafter: plan_engine(one, batch) for one in known}


def _placed(plans: tuple[Plan, Plan] | None) -> Mode:
    """Where the model of `placement: auto` drafts; in the target's steps where nothing is known of it."""
    mode = Mode.COUPLED if plans is None else plans[1].mode
    logger.info("Spec rollout: by what is known of it, the model drafts %s", _PLACES[mode])
    return mode


def _command(started: StartedDrafter, vllm_config: Any) -> Command:
    """The drafter's engine is like the target's, where its settings say nothing else."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    engine_args = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "enforce_eager": model.enforce_eager,
        **started.engine_args,
    }
    return Command.of(started.model, started.devices, engine_args)
