"""Drafters that are kept warm: begun ahead, each with its model loaded, for engines that attach to them when they want.

What belongs here: their processes, and whether each is ready. Which engine gets which drafter is decided elsewhere
(SpecActor 4.3: loading is what model scale would wait for). Nothing here waits, but for the end of the processes.

vLLM's sleep mode, which would give a resting drafter's memory back, does not exist on CPU. So a warm drafter keeps its
weights and its KV cache; without requests it takes no time.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from vllm_specrollout.cluster.child import Command, DrafterProcess, DrafterProcessError
from vllm_specrollout.errors import ConfigError

logger = logging.getLogger("vllm.specrollout")


class WarmPool:
    """Some drafters of one host. Use it as a context: its processes end with it.

    Args:
        commands: name -> how the process is begun. It serves at its address, and stays when an engine leaves it.
        clock: seconds, from any zero.

    Raises:
        ConfigError: two of them have one address.
    """

    def __init__(self, commands: Mapping[str, Command], clock: Callable[[], float] = time.monotonic) -> None:
        addresses = [command.address for command in commands.values()]
        if len(set(addresses)) != len(addresses):
            raise ConfigError(f"two drafters have one address: {sorted(addresses)}", "give each an address of its own")
        self.failures: dict[str, str] = {}
        """Drafters that ended too often: name -> what was said of it."""
        self._folder = tempfile.TemporaryDirectory(prefix="specrollout-warm-")
        self._processes: dict[str, DrafterProcess] = {}
        try:
            for i, (name, command) in enumerate(commands.items()):
                own = replace(command, stays=True, ready=str(Path(self._folder.name) / str(i)))
                self._processes[name] = DrafterProcess(own, clock)
        except BaseException:
            self.stop()
            raise

    @property
    def addresses(self) -> dict[str, str]:
        """name -> where to attach."""
        return {name: process.command.address for name, process in self._processes.items()}

    def is_ready(self, name: str) -> bool:
        """Whether the drafter has loaded its model and serves. One that was begun anew says so anew."""
        process = self._processes[name]
        try:
            return process.is_alive and Path(process.command.ready).read_text("ascii") == str(process.pid)
        except FileNotFoundError:
            return False

    def pid(self, name: str) -> int | None:
        return self._processes[name].pid

    def watch(self) -> list[str]:
        """Begin anew what has ended, with the patience of `DrafterProcess`; call it now and then.

        Returns:
            The drafters that were found to have ended. Engines that use shared memory have to attach to them anew.
        """
        ended = []
        for name, process in self._processes.items():
            if name not in self.failures:
                # what has not loaded in good time is begun anew
                process.is_ready = process.is_ready or self.is_ready(name)
                try:
                    if process.watch():
                        ended.append(name)
                except DrafterProcessError as error:
                    self.failures[name] = str(error)
                    logger.warning("Spec rollout: drafter `%s` drafts no more: %s", name, error)
                    ended.append(name)
        return ended

    def stop(self) -> None:
        """End them all."""
        for process in self._processes.values():
            process.dismiss()
        for process in self._processes.values():
            process.stop()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
