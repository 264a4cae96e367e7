"""A drafter's process, as the engine that it drafts for sees it: started, watched, begun anew, stopped.

What belongs here: the process alone. What is said to it goes through a mailbox. Nothing here waits for it, but for its
beginning and its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_specrollout import envs
from vllm_specrollout.errors import SpecRolloutError

MOST_RESTARTS = 5
"""Times that a process which ends is begun anew, each after twice the patience of the last one."""
_PATIENCE_S = 1.0
_END_S = 5.0  # given to a process that was asked to end


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
        """The engine's own, without what switches spec rollout on: the drafter is another kind of engine."""
        own = {name: value for name, value in os.environ.items() if name != envs.SPEC_ROLLOUT}
        own |= {"VLLM_PLUGINS": "none", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
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
        if self.count >= MOST_RESTARTS:
            return False
        self._due_at = self._clock() + _PATIENCE_S * 2**self.count
        self.count += 1
        return True

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
        """Seconds in which the process that began it waited for its end."""
        self._clock = clock
        self._restarts = Restarts(clock)
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
        if self._restarts.is_waiting:
            if self._restarts.is_due:
                self._begin_anew()
            return False
        if self.is_alive:
            return False
        status = None if self._process is None else self._process.returncode
        self._ended(f"ended with status {status}")
        return True

    def kill(self) -> None:
        """End it at once, without waiting until it has: `watch` notices, and begins it anew."""
        if self._process is not None:
            self._process.kill()

    def dismiss(self) -> None:
        """Ask it to end, without waiting until it has, and watch no more; `stop` sees to that it does."""
        self._restarts.leave()
        if self.is_alive:
            assert self._process is not None
            self._process.terminate()

    def stop(self) -> None:
        """End it for good."""
        process, self._process = self._process, None
        self._restarts.leave()
        if process is None or process.poll() is not None:
            return
        process.terminate()
        begin = self._clock()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
                return
            process.kill()
            process.wait()
        finally:
            self.waited_s += self._clock() - begin

    def _begin_anew(self) -> None:
        try:
            self._begin()
        except OSError as error:
            # the host has no room for a process now: that costs a try
            self._process = None
            self._ended(f"could not be begun: {error}")

    def _ended(self, how: str) -> None:
        if not self._restarts.ended():
            raise DrafterProcessError(
                f"the drafter's process {how}, and was begun anew {self.restarts} times",
                "look at its own messages above; `specrollout drafter MODEL --listen ADDRESS` runs it by hand",
            )

    def _begin(self) -> None:
        self._restarts.leave()
        # its own group: an interrupt from the keyboard reaches the engine, which ends it in order
        self._process = subprocess.Popen(
            self.command.argv, env=self.command.environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
