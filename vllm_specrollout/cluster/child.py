"""A drafter's process, as the engine that it drafts for sees it: started, watched, begun anew, stopped.

What belongs here: the process alone. What is said to it goes by mail. Nothing here waits for it, but for its
beginning and its end.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_specrollout.cluster.leftovers import SOCKET, sweep
from vllm_specrollout.cluster.leftovers import own as name_of
from vllm_specrollout.cluster.mail import MailClient
from vllm_specrollout.cluster.messages import VERSION, Hello, Rest
from vllm_specrollout.config import envs
from vllm_specrollout.config.devices import Devices, together
from vllm_specrollout.errors import SpecRolloutError, logger

MOST_RESTARTS = 3
"""Times that a process which ends is begun anew, each after twice the patience of the last one."""
KV_CACHE = 1 << 30
"""Bytes of a drafter's on cores, where its settings name no other."""
# an engine's place in its group, and what it does itself
_TARGETS_ALONE = {envs.SPEC_ROLLOUT, "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
START_S = 900.0
"""Seconds until a process has to draft. One that takes longer is begun anew."""
REST_S = 10.0
"""Seconds in which a drafter has to give its memory back. One that does not is killed, which gives it back as well."""
_PATIENCE_S = 1.0
_POLL_S = 0.05
# Seconds given to a process that was asked to end. vLLM kills an engine 5 s after it told it to end, and until then
# the engine has to have ended its drafters.
_GRACE_S = 2.0


class DrafterProcessError(SpecRolloutError):
    """The process of a drafter cannot be kept alive."""


@dataclass(frozen=True, slots=True)
class Command:
    """How a drafter's process is begun."""

    model: str
    # where it serves
    address: str
    # of vLLM's engine there
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    # None: all cores
    devices: Devices | None = None
    # it is stock vLLM's V2 runner; else it is the V1 runner on CPU, with this plugin
    is_v2: bool = False
    # it begins asleep
    is_asleep: bool = False

    @classmethod
    def of(cls, model: str, devices: Sequence[str], engine_args: Mapping[str, Any]) -> Command:
        """On devices such as `cpu:2-3` or `cuda:1,2`, at an address that no other process has."""
        own = together("devices", devices)
        given = dict(engine_args)
        if own is not None and own.kind == "cuda":
            given.setdefault("tensor_parallel_size", len(own.numbers))
        else:
            given.setdefault("kv_cache_memory_bytes", KV_CACHE)
        sweep()
        address = f"ipc://{tempfile.gettempdir()}/{name_of(SOCKET)}{secrets.token_hex(8)}"
        return cls(model, address, given, own, own is not None and own.kind == "cuda")

    @property
    def argv(self) -> list[str]:
        args = json.dumps(dict(self.engine_args))
        module = "vllm_specrollout.worker.drafter_process"
        on_cores = self.devices is not None and self.devices.kind == "cpu"
        more = ["--cores", ",".join(map(str, self.devices.numbers))] if self.devices and on_cores else []
        more += ["--stock"] if self.is_v2 else []
        more += ["--asleep"] if self.is_asleep else []
        parent = ["--parent", str(os.getpid())]
        return [sys.executable, "-m", module, self.model, self.address, *parent, "--engine-args", args, *more]

    @property
    def environment(self) -> dict[str, str]:
        """The engine's own, without what switches spec rollout on and what is the target's alone."""
        own = {name: value for name, value in os.environ.items() if name not in _TARGETS_ALONE}
        own["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if self.is_v2:
            own |= {"VLLM_PLUGINS": "none", envs.USE_V2_MODEL_RUNNER: "1"}
        else:
            own.pop("TRITON_INTERPRET", None)
            own |= {"VLLM_TARGET_DEVICE": "cpu", envs.USE_V2_MODEL_RUNNER: "0"}
        if self.devices is not None:
            threads = {"OMP_NUM_THREADS": str(len(self.devices.numbers))}
            own |= threads if self.devices.kind == "cpu" else self.devices.environment()
        return own


class DrafterProcess:
    """One process.

    Args:
        clock: seconds, from any zero.
    """

    def __init__(self, command: Command, clock: Callable[[], float] = time.monotonic) -> None:
        self.command = command
        self.is_ready = False
        """Whether it has loaded its model: whoever hears that from it says so here."""
        self.restarts = 0
        self._clock = clock
        # when it was begun, and when it is begun anew; None: it is not
        self._begun_at = 0.0
        self._due_at: float | None = None
        # it is wanted no more
        self._is_over = False
        # why there is none
        self._why = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._begin()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def watch(self) -> bool:
        """Begin it anew if it has ended, not at once; True: it was found to have ended.

        Raises:
            DrafterProcessError: it has ended too often.
        """
        now = self._clock()
        if self._is_over:
            return False
        if self._due_at is not None:
            if now >= self._due_at:
                self._begin()
            return False
        if self.is_alive:
            if not self.is_ready and now - self._begun_at > START_S:
                model = self.command.model
                logger.warning("Spec rollout: drafter %s loads for over %.0f s and is killed", model, START_S)
                self.kill()
                self._begun_at = now  # said once, however long it takes to end
            return False
        self._ended()
        return True

    def kill(self, *, waits: bool = False) -> None:
        """End it at once: `watch` notices, and begins it anew."""
        if self._process is not None:
            self._process.kill()
            if waits:
                self._process.wait()

    def dismiss(self) -> None:
        """Ask it to end, without waiting until it has; it is begun no more, and killed where it does not end in time.

        Without that one that is stopped, or hangs, would keep its cores and its memory as long as its engine lives.
        """
        if not self._is_over and self.is_alive:
            assert self._process is not None
            self._process.terminate()
            ending = threading.Timer(_GRACE_S, self._process.kill)
            ending.daemon = True
            ending.start()
        self._is_over = True

    def stop(self) -> None:
        """End it for good, and wait until it has. One that was dismissed before has had part of its time already."""
        self.dismiss()
        process, self._process = self._process, None
        if process is not None:
            process.wait()

    def _ended(self) -> None:
        if self._process is not None:
            self._why = f"ended with status {self._process.returncode}"
        self._due_at = None
        if self.restarts >= MOST_RESTARTS:
            raise DrafterProcessError(
                f"the drafter's process {self._why}, and was begun anew {self.restarts} times",
                "look at its own messages above; `specrollout drafter MODEL --listen ADDRESS` runs it by hand",
            )
        self._due_at = self._clock() + _PATIENCE_S * 2**self.restarts
        self.restarts += 1

    def _begin(self) -> None:
        self._due_at = self._process = None
        self._begun_at, self.is_ready = self._clock(), False
        # The kernel ends it with the thread that begins it, so that one that hangs outlives no engine. Only the first
        # thread is known to live as long as its process.
        is_bound = threading.get_native_id() == os.getpid()
        # its own group: an interrupt from the keyboard reaches the engine, which ends it in order
        argv = [*self.command.argv, *(["--bound"] if is_bound else [])]
        environment = self.command.environment
        try:
            self._process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            # the host has no room for a process now: that costs a try
            self._why = f"could not be begun: {error}"


class WarmDrafter:
    """A drafter beside an engine, on its devices: asleep while that works, and awake for others once it is idle.

    Asleep it holds its weights alone, on GPUs in the host's memory (SpecActor 4.3, model scale: loading them anew would
    take longer than the tail of a batch). It begins asleep.

    Args:
        command: how its process is begun.
        clock: seconds, from any zero.
    """

    def __init__(self, command: Command, clock: Callable[[], float] = time.monotonic) -> None:
        self.error = ""
        """Why it will not draft any more."""
        self.process = DrafterProcess(replace(command, is_asleep=True), clock)
        self._clock = clock
        self._meet()

    def _meet(self) -> None:
        """Its present life knows nothing of what was said to the former one."""
        # that life, whether it was told to wake up, and what it said last
        self._life, self._is_woken, self._is_asleep = self.process.pid, False, True
        self._box = MailClient(self.process.command.address)
        self._box.send(Hello(VERSION, 0))

    @property
    def is_ready(self) -> bool:
        """Whether it has loaded, and lives. Call it now and then."""
        if self.error:
            return False
        try:
            self.process.watch()
        except DrafterProcessError as error:
            self.error = str(error)
            logger.warning("Spec rollout: a warm drafter drafts no more: %s", error)
            return False
        if self._life != self.process.pid:
            self._box.close()
            self._meet()
        self._hear()
        return self.process.is_ready and self.process.is_alive

    @property
    def address(self) -> str:
        """Where it drafts; empty: it sleeps, loads, was begun anew, or is given up. Call it now and then."""
        is_awake = self.is_ready and self._is_woken and not self._is_asleep
        return self.process.command.address if is_awake else ""

    def wake(self) -> None:
        """Have it draft, once it has loaded. Nothing is waited for: `address` says when it does."""
        if self.is_ready and not self._is_woken:
            self._is_woken = self._box.send(Rest(False))

    def sleep(self) -> None:
        """Have it give its memory back, and wait until it has."""
        was_woken, self._is_woken = self._is_woken, False
        if not was_woken or self._life != self.process.pid or not self.process.is_alive:
            return  # another life begins asleep
        self._is_asleep, until = False, self._clock() + REST_S
        self._box.send(Rest(True))
        while not self._is_asleep and self.process.is_alive and self._clock() < until:
            self._box.wait(_POLL_S)
            self._hear()
        if not self._is_asleep and self.process.is_alive:
            logger.warning("Spec rollout: a drafter did not give its memory back within %.0f s and is killed", REST_S)
            self.process.kill(waits=True)

    def stop(self) -> None:
        self._box.close()
        self.process.stop()

    def _hear(self) -> None:
        for message in self._box.receive():
            if isinstance(message, Hello):
                self.process.is_ready = True
            elif isinstance(message, Rest):
                self._is_asleep = message.is_asleep
