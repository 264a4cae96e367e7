"""The trainer's process, as the engine's process sees it: what is wished of it, what it said, begun anew when it ends.

All that it is told is a state and no event, so one that was killed hears the same again. It needs no torch.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from vllm_specrollout.cluster.child import DrafterProcess, DrafterProcessError
from vllm_specrollout.config import envs
from vllm_specrollout.config.devices import together
from vllm_specrollout.errors import logger

MODULE = "vllm_specrollout.training.process"


class Wish(msgspec.Struct, frozen=True, array_like=True):
    """What the trainer shall do; numbers only rise."""

    is_halted: bool = True
    # learning that shall go on until it brings nothing
    learning: int = 0
    # number of the head that shall be written
    publish: int = 0
    # times that an engine went back to the head before
    backs: int = 0


class Said(msgspec.Struct, frozen=True, array_like=True):
    """What the trainer does."""

    # learning that has ended; heads that were written, and that could not be
    ended: int = 0
    published: int = 0
    failed: int = 0
    wants_rows: bool = False
    # something is left to learn from
    has_more: bool = False
    # answers that have come
    answers: int = 0
    rows: int = 0
    steps: int = 0
    # of work, and of the last step
    seconds: float = 0.0
    step_s: float = 0.0
    # accepted tokens per draft, as `spot.HeardTrainer`
    own: float = 0.0
    serving: float = 0.0
    # rows that they were judged by
    judged: int = 0
    halts: int = 0
    # what went wrong last
    error: str = ""


class Duty(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer's process is begun with."""

    target: str
    # where its state and its heads are kept
    dir: str
    # the one that serves, which it goes on from where there is no state
    head: str
    is_new: bool = False
    method: str = "eagle3"
    num_levels: int = 6
    # further fields of `LearnerConfig`
    learner: dict[str, Any] = {}
    # ipc addresses: of its parent, and of rows
    control: str = ""
    rows: str = ""
    parent: int = 0
    memory_gib: float = 4.0
    judge_rows: int = 16384
    # of what was wished so far
    done: Wish = Wish()
    # such as `cpu:3`; empty: the engine's, while it idles
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Begin:
    """As `cluster.child.Command`."""

    own: TrainerProcess

    model = "trainer"

    @property
    def argv(self) -> list[str]:
        duty = self.own.duty
        # it begins while nobody is there, and whoever comes is served first
        first = [] if duty.devices else ["nice", "-n", "10"]
        return [*first, sys.executable, "-m", MODULE, msgspec.json.encode(duty).decode()]

    @property
    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if name not in (envs.SPEC_ROLLOUT, "TRITON_INTERPRET")}
        devices = together("train.devices", self.own.duty.devices)
        if devices is not None:
            own |= devices.environment()
            if devices.kind == "cpu":
                own["CUDA_VISIBLE_DEVICES"] = ""
        return own


class TrainerProcess:
    """
    Args:
        duty: what it is begun with; addresses and numbers are filled in here.
    """

    def __init__(self, duty: Duty) -> None:
        self.control = f"ipc://{tempfile.gettempdir()}/{_name(duty.dir)}-{os.getpid()}"
        self.duty = msgspec.structs.replace(duty, control=self.control, rows=rows_address(duty.dir), parent=os.getpid())
        self.wish, self.said = self.duty.done, Said(ended=duty.done.learning, published=duty.done.publish)
        self.error = ""
        """Why there is no trainer any more."""
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.bind(self.control)
        self._process = DrafterProcess(_Begin(self))  # type: ignore[arg-type]

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def tell(self, **changed: Any) -> None:
        self.wish = msgspec.structs.replace(self.wish, **changed)
        self._send()

    def hear(self) -> Said:
        """What it said last. Call it now and then: it is begun anew where it has ended."""
        if self.error:
            return self.said
        try:
            if self._process.watch():
                # what was not written by now is not wished for any more: another judgement will be
                self.wish = msgspec.structs.replace(self.wish, publish=self.said.published)
                self.said = msgspec.structs.replace(self.said, own=0.0, wants_rows=False)
                done = msgspec.structs.replace(self.wish, learning=self.said.ended)
                self.duty = msgspec.structs.replace(self.duty, done=done)
        except DrafterProcessError as error:
            self.give_up(error.cause)
            return self.said
        while self._socket.poll(0):
            said = msgspec.msgpack.decode(self._socket.recv(), type=Said)
            if not self._process.is_ready:
                self._process.is_ready = True
                self._send()
            if said.steps > self.said.steps:
                self._process.restarts = 0  # it gets on
            self.said = said
        return self.said

    def give_up(self, why: str) -> None:
        self.error = why
        logger.warning("Spec rollout: the head learns no more: %s", why)
        self.stop()

    def serves(self, head: Path) -> None:
        """The engine drafts with another head by now."""
        self.duty = msgspec.structs.replace(self.duty, head=str(head), is_new=False)

    def stop(self) -> None:
        self._process.stop()
        self._socket.close(linger=0)
        for address in (self.control, self.duty.rows):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _send(self) -> None:
        if self._process.is_ready and self._process.is_alive:
            self._socket.send(msgspec.msgpack.encode(self.wish), zmq.NOBLOCK)


def rows_address(folder: str) -> str:
    """Where a trainer takes rows while it learns: of all engines on this host that share its folder."""
    return f"ipc://{tempfile.gettempdir()}/{_name(folder)}-rows"


def _name(folder: str) -> str:
    # a socket's path may have some 100 characters
    return f"specrollout-trainer-{hashlib.blake2b(os.path.realpath(folder).encode(), digest_size=8).hexdigest()}"


def numbers_in(folder: Path) -> Sequence[int]:
    """Of the heads that were published there, ascending."""
    return sorted(int(one.parent.name) for one in folder.glob("*/config.json") if one.parent.name.isdecimal())
