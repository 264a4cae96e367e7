"""The parent's side of an engine process: start it, ask it, end it.

Stock and our engine live in two processes at once; the idle one waits on its pipe. Its worker polls shared memory for a
second after its last step (vLLM's `SpinCondition`), so a run of one engine waits until the other has gone quiet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from vllm_specrollout.config import envs
from vllm_specrollout.errors import SpecRolloutError

from . import leash

QUIET_S = 1.2
"""Seconds after its last step until an idle engine's worker blocks; vLLM polls for 1 s."""
_CHILD = Path(__file__).with_name("engine_child.py")
_END_S = 20.0
"""Seconds in which an idle engine has to shut down."""
_LOG_LINES = 20
_PLUGIN = "spec_rollout"
_EXTENSION = "vllm_specrollout.bench.runner.tuning.Tuning"
"""Calls of our engines' workers that benchmarks alone make; by name, since importing it takes vLLM."""


class EngineFailed(SpecRolloutError):
    """An engine did not start, or stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine process is made of."""

    # shown in errors
    name: str
    # keyword arguments of `vllm.LLM`
    arguments: dict[str, Any]
    # GiB of KV cache
    kv_gib: int = 1
    # False: vLLM as it is without this project, its plugin not loaded
    has_plugin: bool = False
    # None: switched off. Needs the plugin.
    spec_rollout: dict[str, Any] | None = None
    # show vLLM's own log
    is_verbose: bool = False
    # variables of the process, above all others
    environment: Mapping[str, str] = field(default_factory=dict)


class EngineProcess:
    """A running engine; a context manager. Not thread-safe."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._last_use = 0.0
        # an answer is outstanding, or will never come
        self._is_busy = False
        # open as long as the process lives
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        is_ours = spec.spec_rollout is not None
        own = {"spec_rollout": spec.spec_rollout, "worker_extension_cls": _EXTENSION} if is_ours else {}
        arguments = {**spec.arguments, **own}
        output = sys.stderr if spec.is_verbose else self._log
        self._pipe, child_end = Pipe()
        with child_end:
            descriptor = child_end.fileno()
            # -P: the script's own folder must not stand on the import path
            program, environment = ["-P", str(_CHILD), str(descriptor)], child_environment(dict(os.environ), spec)
            self._process, self._leash = leash.spawn(program, environment, output, [descriptor])
        try:
            self._exchange({"is_ours": is_ours, "arguments": arguments})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, operation: str, **arguments: Any) -> Any:
        """The result of one operation of `engine_child.DrivenEngine`, or `EngineFailed`."""
        try:
            return self._exchange((operation, arguments))
        finally:
            self._last_use = time.monotonic()

    def log(self) -> str:
        """What vLLM has logged so far; empty if it was shown instead."""
        # seeking would move the place where the child writes next
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def quiet_in(self) -> float:
        """Seconds until this engine no longer takes processor time from others."""
        return max(0.0, self._last_use + QUIET_S - time.monotonic())

    def close(self) -> None:
        """End the engine and its workers; by force if they are in the middle of something. Once is enough."""
        if self._pipe.closed:
            # the group's number may be another one's by now
            return
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        if self._is_busy or not self._ends_within(_END_S):
            for number in (signal.SIGTERM, signal.SIGKILL):
                self._signal(number)
                if self._ends_within(_END_S / 4):
                    break
        self._leash.release()
        self._log.close()

    def _ends_within(self, seconds: float) -> bool:
        """Whether this child and all that it started are gone in time."""
        end = time.monotonic() + seconds
        while self._process.poll() is None or self._signal(0):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def _signal(self, number: int) -> bool:
        """Signal the group that start_new_session made; False if nobody is left in it."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _exchange(self, message: Any) -> Any:
        self._is_busy = True
        try:
            self._pipe.send(message)
            reply = self._pipe.recv()
        except (EOFError, OSError):
            raise self._failure("its process ended", "") from None
        self._is_busy = False
        if "error" in reply:
            raise self._failure(reply["error"], reply["trace"])
        return reply["result"]

    def _failure(self, cause: str, trace: str) -> EngineFailed:
        cause, _, hint = cause.partition("\n\nhint: ")
        if hint:
            return EngineFailed(f"the {self.spec.name} engine failed: {cause}", hint)
        lines = trace.splitlines()
        lines += self.log().splitlines()
        tail = "\n".join(f"    {line}" for line in lines[-_LOG_LINES:])
        return EngineFailed(f"the {self.spec.name} engine failed: {cause}\n{tail}", "run again with `--verbose`")


def child_environment(environment: dict[str, str], spec: EngineSpec) -> dict[str, str]:
    """The environment of an engine process: the caller's, with what must be equal or off in both."""
    changed = dict(environment)
    changed.pop(envs.SPEC_ROLLOUT, None)
    changed[envs.CPU_ATTN_SPLIT_KV] = "0"
    changed["VLLM_CPU_KVCACHE_SPACE"] = str(spec.kv_gib)
    changed["VLLM_NO_USAGE_STATS"] = "1"
    if not spec.is_verbose:
        changed["VLLM_LOGGING_LEVEL"] = "ERROR"
    if not spec.has_plugin:
        # other plugins stay on in both engines; a name that none has keeps vLLM from loading all
        given = changed.get("VLLM_PLUGINS")
        groups = [group for group in entry_points().groups if group.startswith("vllm.")]
        installed = {name for group in groups for name in entry_points(group=group).names}
        names = given.split(",") if given is not None else sorted(installed)
        changed["VLLM_PLUGINS"] = ",".join(name for name in names if name != _PLUGIN) or "none"
    return {**changed, **spec.environment}
