"""A model that drafts in a process of its own, as the target's runner sees it: begun with the engine, ended with it."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.decoupled.child import Command, DrafterProcess, cores_of
from vllm_specrollout.decoupled.mailbox import Mailbox
from vllm_specrollout.decoupled.messages import Hello, Noise, Role
from vllm_specrollout.drafters.decoupled import DecoupledDrafter, Sampling
from vllm_specrollout.verify.tape import SeedTape
from vllm_specrollout.worker.common import config_of, is_first_rank

logger = init_logger(__name__)

_POLL_S = 0.02  # while the engine starts
_KV_CACHE = 1 << 30  # bytes of the drafter's, where its settings name no other


class V1Noise:
    """What the V1 runner on CPU knows of its requests.

    Args:
        runner: our V1 runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def sampling(self, request_id: str) -> Sampling:
        entry = self._entry(request_id)
        if entry.is_greedy:
            return Sampling(0.0)
        params = entry.state.sampling_params
        return Sampling(params.temperature, max(params.top_k, 0), params.top_p, params.min_p)

    def seeds(self, request_id: str, count: int) -> npt.NDArray[np.int64]:
        tape = self._entry(request_id).tape
        if not isinstance(tape, SeedTape):
            return np.zeros(0, dtype=np.int64)
        return tape.peek(count).copy()

    def _entry(self, request_id: str) -> Any:
        return self._runner.book.get(self._runner.requests[request_id])


@dataclass(frozen=True, slots=True)
class Remote:
    """The drafter's process and what belongs to it, from the engine's start to its end."""

    mailbox: Mailbox
    process: DrafterProcess | None
    drafter: DecoupledDrafter


def begin(runner: Any) -> Remote | None:
    """Start what the configuration asks for; None: nothing, or another rank drafts.

    It gets ready while the target's weights are loaded.
    """
    vllm_config = runner.vllm_config
    config = config_of(vllm_config)
    if not config.is_decoupled or not is_first_rank():
        return None
    # imported late: engines without a drafter elsewhere need no sockets
    from vllm_specrollout.decoupled.address import open_mailbox

    own = config.decoupled
    process = None
    if own.address:
        mailbox = open_mailbox(own.address, serve=False, keys=own.keys or None)
    else:
        # a name that no other engine has
        address = f"shm://spec-rollout-{os.getpid()}-{time.monotonic_ns():x}"
        mailbox = open_mailbox(address, serve=True)
        process = DrafterProcess(_command(config, vllm_config, address))
    mailbox.send(Hello(Role.VERIFIER, vllm_config.model_config.get_vocab_size(), Noise.TAPE, 0, 0, {}))
    drafter = DecoupledDrafter(
        mailbox,
        V1Noise(runner),
        len(config.drafters),
        window=own.window,
        fan_out=own.fan_out,
        vocab_size=vllm_config.model_config.get_vocab_size(),
        process=process,
    )
    return Remote(mailbox, process, drafter)


def keep_off(config: SpecRolloutConfig) -> None:
    """Leave the drafter's cores to it: threads of two engines on one core wait for each other in every product.

    Does nothing where the user has bound this engine's threads, or would leave it no core.
    """
    own = os.sched_getaffinity(0) - set(cores_of(config.devices))
    bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if not config.is_decoupled or not config.devices or bound not in ("auto", "nobind") or not own:
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), own)
    # vLLM puts something else in the place of `torch.set_num_threads`
    torch._C.set_num_threads(len(own))


def join(runner: Any) -> None:
    """The drafter drafts from now on. Waits until it is there, or takes too long: the engine starts either way."""
    remote: Remote | None = runner.remote
    if remote is None:
        return
    runner.spec_rollout.replace_drafters([*runner.spec_rollout.drafters, remote.drafter])
    most_s, begin_s = config_of(runner.vllm_config).decoupled.start_s, time.monotonic()
    while not remote.drafter.is_there:
        remote.drafter.receive()
        if time.monotonic() - begin_s > most_s or (remote.process is not None and not remote.process.is_alive):
            logger.warning(
                "Spec rollout: the decoupled drafter is not there after %.0f s; requests decode plainly until it is",
                time.monotonic() - begin_s,
            )
            return
        time.sleep(_POLL_S)


def _command(config: SpecRolloutConfig, vllm_config: Any, address: str) -> Command:
    """The drafter's engine is like the target's, where its settings say nothing else."""
    given = dict(config.speculative_config or {})
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    engine_args = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "enforce_eager": model.enforce_eager,
        "kv_cache_memory_bytes": _KV_CACHE,
        **config.decoupled.engine_args,
    }
    return Command(str(given["model"]), address, engine_args, cores_of(config.devices), config.decoupled.most_nodes)
