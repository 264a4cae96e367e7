"""Models that draft in processes of their own, as the target's runner sees them: begun with the engine, or attached.

With `placement: auto` a duel finds whether a model drafts faster in the target's steps or beside them. A drafter
elsewhere is told how tokens of the target's requests are sampled, and their seeds.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from vllm_specrollout.budgets.base import Backoff, Budget
from vllm_specrollout.budgets.registry import make_budget
from vllm_specrollout.cluster.child import Command, DrafterProcess, WarmDrafter
from vllm_specrollout.cluster.duel import Duel
from vllm_specrollout.cluster.line import Sampling
from vllm_specrollout.cluster.link import SamplingOf
from vllm_specrollout.cluster.mail import Box
from vllm_specrollout.cluster.planner import plan_engine
from vllm_specrollout.cluster.profiles import DrafterProfile, Learning, kept, of_engine, save
from vllm_specrollout.cluster.rates import Mode
from vllm_specrollout.cluster.reconfigure import Replanning
from vllm_specrollout.config import DECOUPLED_SOURCES, SpecRolloutConfig
from vllm_specrollout.config.devices import parse_devices, shared
from vllm_specrollout.config.drafters import SINGLE, StartedDrafter
from vllm_specrollout.drafters.decoupled import DecoupledDrafter, connect
from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.types import DraftLimits, RequestBatch, StepPlan, StepRecord, TreeBatch
from vllm_specrollout.worker.common import config_of, is_first_rank
from vllm_specrollout.worker.models.drafter import ModelDrafter
from vllm_specrollout.worker.profiling import key_of

logger = logging.getLogger("vllm.specrollout")

SHARE: dict[str, Any] = {
    "enable_sleep_mode": True,
    "kv_cache_memory_bytes": 2 << 30,
    # vLLM looks whether so much is free, and takes what is said above
    "gpu_memory_utilization": 0.01,
    # a warm drafter has b_max requests, each with some branches; more seats take memory for logits
    "max_num_seqs": 64,
}
"""What a drafter takes of its engine's GPU, where nothing else is said: some 2 to 3 GB with half a billion weights."""
_POLL_S = 0.02  # while the engine starts
_WINDOW = 4  # of a drafter of which nothing is known


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


COUPLED, DECOUPLED = 0, 1


class Placing(Listener):
    """Tells the duel what steps took, and does what it says.

    Args:
        runner: ours, with a model that drafts here, and drafters elsewhere.
    """

    def __init__(self, runner: Any) -> None:
        config = config_of(runner.vllm_config)
        self.duel = Duel()
        self.now, self.changes = COUPLED, 0
        self._speculator = runner.spec_rollout
        self._here: ModelDrafter = runner.model_drafter
        self._elsewhere: DecoupledDrafter = runner.remote
        # of the target: all of them, and those beside the drafters; empty: nothing moves
        self._cores = set().union(*(os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")))
        self._own_cores = own_cores(config, self._cores)
        # steps take another time on fewer cores, and drafts cost something else: each arrangement learns for itself
        self._budgets = [runner.spec_rollout.budget, make_budget(config)]
        self._elsewhere.rest(True)

    def begin_with(self, mode: Mode) -> None:
        """What is planned is tried first."""
        self.duel = Duel(int(mode is Mode.DECOUPLED))

    def stepped(self, record: StepRecord) -> None:
        timing = record.timing
        is_there = any(link.is_there for link in self._elsewhere.links.values())
        if not is_there or self._here not in self._speculator.drafters:
            self.arrange(DECOUPLED if is_there else COUPLED)
            return
        if timing is not None and timing.is_decode_only:
            self.duel.step(timing.batch, timing.tokens, timing.step_ms / 1e3)
        self.arrange(self.duel.choice)

    def renew(self, budget: Budget) -> None:
        """A budget for the arrangement that is not used now; the speculator has the other one."""
        self._budgets[1 - self.now] = budget

    def arrange(self, arrangement: int) -> None:
        """From the next step on, the model drafts here or elsewhere."""
        if arrangement == self.now:
            return
        self._budgets[self.now] = self._speculator.budget
        self.now, self.changes = arrangement, self.changes + 1
        self._here.is_resting = arrangement == DECOUPLED
        self._elsewhere.rest(arrangement == COUPLED)
        self._speculator.budget = self._budgets[arrangement]
        self._speculator.backoff = Backoff()
        if self._own_cores:
            use_cores(self._own_cores if arrangement == DECOUPLED else self._cores)


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
    if own.address:
        drafter.link(SINGLE, Box(own.address, key_file=own.key_file))
    for started in config.begun:
        process = DrafterProcess(_command(started, vllm_config))
        drafter.link(started.name, Box(process.command.address), process)
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
    return WarmDrafter(_command(given, runner.vllm_config))


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
    learning = Learning(drafter, keep)
    runner.spec_rollout.listeners.append(learning)
    if (kind := config.decoupled.reconfigure) != "off":
        runner.replanning = Replanning(drafter, learning, printed=kind == "paper")
        runner.spec_rollout.listeners.append(runner.replanning)
    # on the device both draft at once, and each request gets the better draft
    placing = Placing(runner) if isinstance(runner.model_drafter, ModelDrafter) else None
    if placing is not None:
        runner.spec_rollout.listeners.append(placing)
    if config.profile != "off":
        _plan(runner, drafter, placing)
    most_s, begin_s = config.decoupled.start_s, time.monotonic()
    while missing := [link for link in drafter.links.values() if not link.is_there]:
        drafter.receive()
        is_hopeless = all(link.process is not None and not link.process.is_alive for link in missing)
        if time.monotonic() - begin_s > most_s or is_hopeless:
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


def _plan(runner: Any, drafter: DecoupledDrafter, placing: Placing | None) -> None:
    """Begin as is planned with what is known of the drafters: with which window, and in which of two places."""
    config, batch = config_of(runner.vllm_config), runner.vllm_config.scheduler_config.max_num_seqs
    if config.decoupled.window and placing is None:
        return
    known = {one.drafter: one for one in of_engine(kept(), key_of(runner.vllm_config))}
    for link in drafter.links.values():
        profile = None if link.process is None else known.get(link.process.command.model)
        if profile is None:
            continue
        ahead, best = plan_engine(profile, batch)
        link.window = config.decoupled.window or ahead.window
        if placing is not None and link.name == SINGLE:
            placing.begin_with(best.mode)
        logger.info(
            "Spec rollout: drafter `%s` is planned with a window of %d: %.2f tokens a step, %.2f times plain decoding",
            *(link.name, link.window, ahead.tokens_per_step, ahead.gain),
        )  # fmt: skip


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
