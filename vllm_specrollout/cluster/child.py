"""A drafter's process, as the engine that it drafts for sees it: started, watched, begun anew, stopped.

What belongs here: the process alone. What is said to it goes through a mailbox. Nothing here waits for it, but for its
beginning and its end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_specrollout.config import envs
from vllm_specrollout.errors import SpecRolloutError

logger = logging.getLogger("vllm.specrollout")

MOST_RESTARTS = 5
"""Times that a process which ends is begun anew, each after twice the patience of the last one."""
RECOVERED_S = 3600.0
"""Seconds of life after which earlier ends count no more: what ends once a week is not given up."""
LOAD_S = 1800.0
"""Seconds that a process may load for. One that takes longer counts as hanging, and is begun anew."""
_PATIENCE_S = 1.0
# Seconds given to a process that was asked to end. vLLM kills an engine 5 s after it told it to end, and until then
# the engine has to have ended its drafters. One that stays has its address to remove, and a pool, which is in no hurry.
_GRACE_S, _STAYING_GRACE_S = 2.0, 5.0


class DrafterProcessError(SpecRolloutError):
    """The process of a drafter cannot be kept alive."""


@dataclass(frozen=True, slots=True)
class Command:
    """How a drafter's process is begun."""

    model: str
    address: str
    # of vLLM's engine there
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    # CPU cores; empty: all of them
    cores: tuple[int, ...] = ()
    # of a stream that are looked behind, at most; None: as the process has it
    most_nodes: int | None = None
    # whether it serves at the address itself, and stays when a verifier leaves, for the next one
    stays: bool = False
    # file in which it leaves its process id once it is ready; empty: none
    ready: str = ""

    @property
    def argv(self) -> list[str]:
        args = json.dumps(dict(self.engine_args))
        module = "vllm_specrollout.worker.streams.process"
        more = ["--cores", ",".join(map(str, self.cores))] if self.cores else []
        more += [] if self.most_nodes is None else ["--most-nodes", str(self.most_nodes)]
        more += ["--stay"] if self.stays else []
        more += ["--ready", self.ready] if self.ready else []
        parent = ["--parent", str(os.getpid())]
        return [sys.executable, "-m", module, self.model, self.address, *parent, "--engine-args", args, *more]

    @property
    def environment(self) -> dict[str, str]:
        """The engine's own, without what switches spec rollout on: the drafter is another kind of engine. It runs on
        CPU, whatever the target runs on, with vLLM's V1 runner, and its kernels are not interpreted."""
        own = {name: value for name, value in os.environ.items() if name not in (envs.SPEC_ROLLOUT, "TRITON_INTERPRET")}
        own |= {"VLLM_PLUGINS": "none", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        own |= {"VLLM_TARGET_DEVICE": "cpu", envs.USE_V2_MODEL_RUNNER: "0"}
        if self.cores:
            own["OMP_NUM_THREADS"] = str(len(self.cores))
        # a rank's place in its group is the target's alone
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            own.pop(name, None)
        return own


def cores_of(devices: Sequence[str]) -> tuple[int, ...]:
    """The cores of devices such as `cpu:1` and `cpu:2-3`."""
    cores: list[int] = []
    for device in devices:
        first, _, last = device.removeprefix("cpu:").partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(dict.fromkeys(cores))


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
            self._kill_at = self._clock() + (_STAYING_GRACE_S if self.command.stays else _GRACE_S)
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
        # thread is known to live as long as its process; and one that stays has an address to remove.
        is_bound = threading.get_native_id() == os.getpid() and not self.command.stays
        # its own group: an interrupt from the keyboard reaches the engine, which ends it in order
        argv = [*self.command.argv, *(["--bound"] if is_bound else [])]
        environment = self.command.environment
        try:
            self._process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            # the host has no room for a process now: that costs a try
            self._why = f"could not be begun: {error}"
