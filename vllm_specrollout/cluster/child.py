"""A drafter's process, as the engine that it drafts for sees it: started, watched, begun anew, stopped.

What belongs here: the process alone. What is said to it goes by mail. Nothing here waits for it, but for its
beginning and its end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from vllm_specrollout.config import envs
from vllm_specrollout.config.devices import Devices, together
from vllm_specrollout.errors import SpecRolloutError

logger = logging.getLogger("vllm.specrollout")

MOST_RESTARTS = 5
"""Times that a process which ends is begun anew, each after twice the patience of the last one."""
RECOVERED_S = 3600.0
"""Seconds of life after which earlier ends count no more: what ends once a week is not given up."""
KV_CACHE = 1 << 30
"""Bytes of a drafter's on cores, where its settings name no other."""
# an engine's place in its group, and what it does itself
_TARGETS_ALONE = {envs.SPEC_ROLLOUT, "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
LOAD_S = 1800.0
"""Seconds that a process may load for. One that takes longer counts as hanging, and is begun anew."""
_PATIENCE_S = 1.0
# Seconds given to a process that was asked to end. vLLM kills an engine 5 s after it told it to end, and until then
# the engine has to have ended its drafters.
_GRACE_S = 2.0
_SOCKET = "specrollout-drafter-"


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
    # file in which it leaves its process id once it drafts; empty: none
    ready: str = ""

    @classmethod
    def of(cls, model: str, devices: Sequence[str], engine_args: Mapping[str, Any]) -> Command:
        """On devices such as `cpu:2-3` or `cuda:1,2`, at an address that no other process has."""
        own = together("devices", devices)
        given = dict(engine_args)
        if own is not None and own.kind == "cuda":
            given.setdefault("tensor_parallel_size", len(own.numbers))
        else:
            given.setdefault("kv_cache_memory_bytes", KV_CACHE)
        _sweep()
        address = f"ipc://{tempfile.gettempdir()}/{_SOCKET}{os.getpid()}-{secrets.token_hex(8)}"
        return cls(model, address, given, own, own is not None and own.kind == "cuda")

    @property
    def argv(self) -> list[str]:
        args = json.dumps(dict(self.engine_args))
        module = "vllm_specrollout.worker.drafter_process"
        on_cores = self.devices is not None and self.devices.kind == "cpu"
        more = ["--cores", ",".join(map(str, self.devices.numbers))] if self.devices and on_cores else []
        more += ["--stock"] if self.is_v2 else []
        more += ["--ready", self.ready] if self.ready else []
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


def _sweep() -> None:
    """Remove the sockets of drafters whose engines were killed: nobody will ask for their names again."""
    for path in Path(tempfile.gettempdir()).glob(f"{_SOCKET}*-*"):
        pid = path.name.removeprefix(_SOCKET).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            with contextlib.suppress(OSError):
                path.unlink()


class Restarts:
    """When a process that has ended is begun anew: `MOST_RESTARTS` times, and never at once.

    Args:
        clock: seconds, from any zero.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.count = 0
        """How often in all."""
        self._tries = 0  # that count
        self._clock = clock
        self._due_at: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it is to be begun anew, now or later."""
        return self._due_at is not None

    @property
    def is_due(self) -> bool:
        return self._due_at is not None and self._clock() >= self._due_at

    def ended(self) -> bool:
        """It has ended, or could not be begun; False: that was too often."""
        self._due_at = None
        if self._tries >= MOST_RESTARTS:
            return False
        self._due_at = self._clock() + _PATIENCE_S * 2**self._tries
        self._tries += 1
        self.count += 1
        return True

    def forgive(self) -> None:
        """It has worked for long: what ended it before counts no more."""
        self._tries = 0

    def leave(self) -> None:
        """It is begun, or no longer wanted."""
        self._due_at = None


class DrafterProcess:
    """One process.

    Args:
        clock: seconds, from any zero.
    """

    def __init__(self, command: Command, clock: Callable[[], float] = time.monotonic) -> None:
        self.command = command
        self.waited_s = 0.0
        """Seconds in which the process that began it waited for its end, or began it anew."""
        self.is_ready = False
        """Whether it has loaded its model: whoever hears that from it says so here."""
        self._clock = clock
        self._restarts = Restarts(clock)
        # when it was begun, and how long it was seen to live
        self._begun_at, self._lived_s = 0.0, 0.0
        # why there is none
        self._why = ""
        # when it is killed; None: it was not asked to end
        self._kill_at: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._begin()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def restarts(self) -> int:
        return self._restarts.count

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def watch(self) -> bool:
        """Begin it anew if it has ended, not at once; True: it was found to have ended.

        Raises:
            DrafterProcessError: it has ended too often.
        """
        now = self._clock()
        if self._kill_at is not None:
            self.see_off()
            return False
        if self._restarts.is_waiting:
            if self._restarts.is_due:
                self._begin()
                self.waited_s += self._clock() - now
                if self._process is None:
                    self._ended()
            return False
        if self.is_alive:
            self._lived_s = now - self._begun_at
            if not self.is_ready and self._lived_s > LOAD_S:
                model = self.command.model
                logger.warning("Spec rollout: drafter %s loads for over %.0f s and is killed", model, LOAD_S)
                self.kill()
                self._begun_at = now  # said once, however long it takes to end
            return False
        self._ended()
        return True

    def kill(self) -> None:
        """End it at once, without waiting until it has: `watch` notices, and begins it anew."""
        if self._process is not None:
            self._process.kill()

    def dismiss(self) -> None:
        """Ask it to end, without waiting until it has; it is begun no more. `see_off` and `stop` see to its end."""
        self._restarts.leave()
        if self._kill_at is None:
            self._kill_at = self._clock() + _GRACE_S
            if self.is_alive:
                assert self._process is not None
                self._process.terminate()

    def see_off(self) -> bool:
        """Look after one that was dismissed, now and then: it is killed once it had its time. True: it has ended.

        Without that one that is stopped, or hangs, would keep its cores and its memory as long as its engine lives.
        """
        if not self.is_alive:
            return True
        if self._kill_at is not None and self._clock() >= self._kill_at:
            self.kill()
        return False

    def stop(self) -> None:
        """End it for good, and wait until it has. One that was dismissed before has had part of its time already."""
        self.dismiss()
        process, self._process, begin = self._process, None, self._clock()
        if process is None or process.poll() is not None:
            return
        assert self._kill_at is not None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(self._kill_at - begin, 0.0))
                return
            process.kill()
            process.wait()
        finally:
            self.waited_s += self._clock() - begin

    def _ended(self) -> None:
        if self.is_ready and self._lived_s >= RECOVERED_S:
            self._restarts.forgive()
        if self._process is not None:
            self._why = f"ended with status {self._process.returncode}"
        if not self._restarts.ended():
            raise DrafterProcessError(
                f"the drafter's process {self._why}, and was begun anew {self.restarts} times",
                "look at its own messages above; `specrollout drafter MODEL --listen ADDRESS` runs it by hand",
            )

    def _begin(self) -> None:
        self._restarts.leave()
        self._process = None
        self._begun_at, self._lived_s, self.is_ready = self._clock(), 0.0, False
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
    """A drafter that is begun ahead, for engines that attach to it when they want.

    vLLM's sleep mode, which would give a resting drafter's memory back, does not exist on CPU. So it keeps its weights
    and its KV cache; without requests it takes no time (SpecActor 4.3: loading is what model scale would wait for).

    Args:
        command: how its process is begun.
        clock: seconds, from any zero.
    """

    def __init__(self, command: Command, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="specrollout-warm-")
        self._ready = Path(self._folder.name) / "ready"
        self.error = ""
        """Why it will not draft any more."""
        self.process = DrafterProcess(replace(command, ready=str(self._ready)), clock)

    @property
    def address(self) -> str:
        """Where it serves; empty: it loads, or was begun anew, or is given up. Call it now and then."""
        if self.error:
            return ""
        try:
            self.process.watch()
            is_ready = self.process.is_alive and self._ready.read_text("ascii") == str(self.process.pid)
        except FileNotFoundError:
            is_ready = False
        except DrafterProcessError as error:
            self.error = str(error)
            logger.warning("Spec rollout: a warm drafter drafts no more: %s", error)
            return ""
        # what has not loaded in good time is begun anew
        self.process.is_ready = self.process.is_ready or is_ready
        return self.process.command.address if is_ready else ""

    def stop(self) -> None:
        self.process.stop()
        self._folder.cleanup()
