"""A trainer: a learner in a process of its own, fed by engines, halted by whoever began it.

What belongs here: the loop. It does what is wished between two optimiser steps, and judges by itself. Its state goes to
a file on a thread, a head aside and then under its number. What fails here costs an interval and no engine.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from vllm_specrollout.config.devices import together
from vllm_specrollout.config.places import make_folder
from vllm_specrollout.errors import SpecRolloutError

from .answers import digest_of
from .heads import (
    UNTRAINED,
    Source,
    load_eagle,
    load_head,
    new_eagle,
    new_head,
    save_eagle,
    save_head,
    saved_dtype,
    shape_of,
    target_ends,
)
from .learner import NEW_RATE, TRAINED_RATE, HeadJudgement, Learner, LearnerConfig
from .parent import Duty, Said, Wish
from .rows import RowSource
from .spot import IDLE_JUDGEMENTS

STATE = "training.pt"
_TELL_S = 0.1
_WAIT_MS = 50  # with nothing to do
_APART = 1.0 + 2.0**-6  # what is left of it in bfloat16
_State = dict[str, torch.Tensor]


class Trainer:
    """
    Args:
        duty: what it is begun with.

    Raises:
        ConfigError: the head cannot be trained further.
    """

    def __init__(self, duty: Duty) -> None:
        self._duty, self._dir, self.wish = duty, Path(duty.dir), duty.done
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(duty.control)
        self.said = Said(ended=duty.done.learning, published=duty.done.publish)
        self._told_at, self._backs = 0.0, duty.done.backs
        target, start = Path(duty.target), Path(duty.head)
        layers, width = shape_of(target, start)
        source = Source(duty.target, layers if duty.method == "eagle3" else (), width)
        head = load_head(start, source) if duty.method == "eagle3" else load_eagle(start, target, source)
        rate = NEW_RATE if duty.is_new else TRAINED_RATE
        config = LearnerConfig(**{"rate": rate, "num_levels": duty.num_levels, **duty.learner})
        self.learner = Learner(head, target_ends(target)[1], config)
        self.source: RowSource | None = None
        # the head that serves, the one before it, and the best one since, with what they are worth
        self._serving, self._before = self._copy(), None
        self._best: _State = {}
        self._worth: dict[str, HeadJudgement] = {}
        self._judged_by: set[bytes] = set()
        self._judged_at = self._in_vain = 0
        self._writing: threading.Thread | None = None
        self._resume()

    # --- the loop ----------------------------------------------------------------------------------------------------

    @property
    def is_learning(self) -> bool:
        return self.wish.learning > self.said.ended

    def turn(self) -> None:
        """Hear what is wished, and do it: one optimiser step at most."""
        is_working = self.is_learning and not self.wish.is_halted
        self._hear(0 if is_working and self.learner.windows.has_more() else _WAIT_MS)
        self._listen()
        if self.wish.publish > max(self.said.published, self.said.failed):
            self._publish(self.wish.publish)
        if self.wish.backs > self._backs:
            self._go_back()
        if self.is_learning and not self.wish.is_halted:
            begin = time.perf_counter()
            self._learn()
            self._say(seconds=self.said.seconds + time.perf_counter() - begin)
        elif time.monotonic() - self._told_at > 1.0:
            self._say()

    def _hear(self, timeout_ms: int) -> None:
        while self._socket.poll(timeout_ms):
            timeout_ms, was_halted = 0, self.wish.is_halted
            self.wish = msgspec.msgpack.decode(self._socket.recv(), type=Wish)
            if self.wish.is_halted and not was_halted:
                self._say(is_urgent=True, halts=self.said.halts + 1)

    def _say(self, *, is_urgent: bool = False, **changed: Any) -> None:
        windows = self.learner.windows
        has_room = windows.num_bytes < self._duty.memory_gib * (1 << 30)
        changed |= {
            "rows": self.learner.rows,
            "steps": self.learner.steps,
            "has_more": windows.has_more() or self._is_due,
        }
        self.said = msgspec.structs.replace(self.said, wants_rows=self.source is not None and has_room, **changed)
        if is_urgent or time.monotonic() - self._told_at > _TELL_S:
            self._told_at = time.monotonic()
            with suppress(zmq.Again):
                self._socket.send(msgspec.msgpack.encode(self.said), zmq.NOBLOCK)

    def _listen(self) -> None:
        """Rows are taken while there is something to learn; without a listener, engines send none."""
        if self.is_learning and self.source is None:
            self.source = RowSource(self._duty.rows)
            self._say(is_urgent=True)
        elif not self.is_learning and self.source is not None:
            self.source.close()
            self.source = None
            self._say(is_urgent=True)
        for rows in self.source.arrived() if self.source is not None else ():
            if self.source.ends is not None:
                self.learner.retarget(*self.source.ends)
                self.source.ends = None
            self._say(answers=self.said.answers + 1)
            if torch.isfinite(rows.hidden).all():
                self.learner.add(rows)

    # --- learning ----------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        learner, begin = self.learner, time.perf_counter()
        loss = learner.step()
        if loss is None:
            learner.windows.drop_done()
        elif math.isfinite(loss):
            self._say(step_s=time.perf_counter() - begin)
        else:
            self._say(error=f"the loss of step {learner.steps + 1} is no number; the step was left out")
        if learner.rows - self._judged_at >= self._duty.judge_rows or (loss is None and self._is_due):
            self._judge()

    @property
    def _is_due(self) -> bool:
        """Whether a judgement says something new, though there is nothing left to learn from."""
        held_out, since = self.learner.windows.held_out(), self.learner.rows - self._judged_at
        return bool(held_out) and (not self.said.judged or since >= self._duty.judge_rows // 16)

    def _judge(self) -> None:
        """Compare the head with the one that serves, on the answers held out by now."""
        held_out = self.learner.windows.held_out()
        judges = {digest_of(one.token_ids.numpy()) for one in held_out}
        if judges != self._judged_by:
            self._worth.clear()
        own = self.learner.judge(goes_on=self._goes_on)
        for name, state in (("serving", self._serving), ("best", self._best)):
            if own is not None and state and name not in self._worth:
                now = self._copy()
                self._set(state)
                found = self.learner.judge(goes_on=self._goes_on)
                self._set(now)
                if found is None:
                    return
                self._worth[name] = found
        if own is None:
            return  # halted: judged once it goes on
        since = self.learner.rows - self._judged_at
        self._judged_by, self._judged_at = judges, self.learner.rows
        best = max((one.accepted for one in self._worth.values()), default=0.0)
        if own.accepted > best:
            self._best, self._worth["best"], self._in_vain = self._copy(), own, 0
        elif own.rows and since >= self._duty.judge_rows // 4:
            self._in_vain += 1
        worth = {name: one.accepted for name, one in self._worth.items()}
        self._say(is_urgent=True, own=worth.get("best", 0.0), serving=worth.get("serving", 0.0), judged=own.rows)
        self._save_state()
        if self._in_vain >= IDLE_JUDGEMENTS:
            self._end()

    def _goes_on(self) -> bool:
        self._hear(0)
        return not self.wish.is_halted

    def _end(self) -> None:
        """Nothing more is to be learned by now: the best head is kept, with the optimiser's state."""
        self._set(self._best or self._serving)
        self._in_vain = 0
        # a higher rate makes a head that was trained worse at first
        self.learner.config = replace(self.learner.config, rate=TRAINED_RATE)
        self._say(is_urgent=True, ended=self.wish.learning)

    # --- heads and state ---------------------------------------------------------------------------------------------

    def _publish(self, number: int) -> None:
        made, now = self._dir / f".{number}.new", self._copy()
        save = save_head if self._duty.method == "eagle3" else save_eagle
        try:
            self._set(self._best or self._serving)
            save(self.learner.head, made, saved_dtype(self.learner.head))
            made.replace(self._dir / str(number))
        except OSError as error:
            shutil.rmtree(made, ignore_errors=True)
            self._say(is_urgent=True, failed=number, error=f"head {number} could not be written: {error}")
            return
        finally:
            self._set(now)
        self._before, self._serving, self._best = self._serving, self._best or self._serving, {}
        if (worth := self._worth.pop("best", None)) is not None:
            self._worth["serving"] = worth
        self._say(is_urgent=True, published=number, own=0.0)

    def _go_back(self) -> None:
        """A head that judged well drafted badly: learning goes on from the one before it, when there is need again."""
        self._backs = self.wish.backs
        self._serving, self._before = self._before or self._serving, None
        self._best = {}
        self._worth.clear()
        self._say(own=0.0)
        self._end()

    def _copy(self) -> _State:
        """What is trained: embedding and the like follow the target."""
        own = self.learner.head.named_parameters()
        return {name: one.detach().clone() for name, one in own if one.requires_grad}

    def _set(self, state: _State) -> None:
        self.learner.head.load_state_dict(state, strict=False)

    def _save_state(self) -> None:
        """On a thread, unless the last one is still at it."""
        if self._writing is not None and self._writing.is_alive():
            return
        own = _cloned(self.learner.state_dict())
        state = {"about": self._about(), "learner": own, "seconds": self.said.seconds}
        self._writing = threading.Thread(target=self._write, args=(state,), name="specrollout-state")
        self._writing.start()

    def _write(self, state: dict[str, Any]) -> None:
        partial = self._dir / f"{STATE}.partial"
        try:
            torch.save(state, partial)
            partial.replace(self._dir / STATE)
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
            partial.unlink(missing_ok=True)
            self.said = msgspec.structs.replace(self.said, error=f"the trainer's state could not be written: {error}")

    def _about(self) -> list[str]:
        return [self._duty.target, self._duty.method, str(self._duty.num_levels)]

    def _resume(self) -> None:
        try:
            state = torch.load(self._dir / STATE, weights_only=True, map_location=self.learner.device)
            if state["about"] == self._about():
                self.learner.load_state_dict(state["learner"])
                self.said = msgspec.structs.replace(self.said, seconds=state["seconds"])
        except FileNotFoundError:
            pass
        except Exception as error:
            self._say(error=f"the trainer's state cannot be read, and is begun anew: {error}")
        self._judged_at = self.learner.rows
        self._say(is_urgent=True)


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {name: _cloned(one) for name, one in value.items()}
    return [_cloned(one) for one in value] if isinstance(value, list) else value


def make_head(
    target: Path,
    folder: Path,
    method: str = "eagle3",
    num_levels: int = 6,
    draft_vocab: Sequence[int] | None = None,
    seed: int = 0,
) -> None:
    """An untrained one, for an engine to begin with. Arguments and errors as of `new_head`."""
    layers, width = shape_of(target, None)
    torch.manual_seed(seed)
    made = folder.with_name(f".{folder.name}.{os.getpid()}")
    make_folder(folder.parent)
    if method == "eagle":
        head = new_eagle(target, Source(str(target), (), width))
        save_eagle(head, made, saved_dtype(head))
    else:
        head = new_head(target, Source(str(target), layers, width), num_levels, draft_vocab)
        # it begins as the target's own, which vLLM would share: then no head could bring another one
        head.lm_head.weight.data *= _APART
        save_head(head, made, saved_dtype(head))
    (made / UNTRAINED).touch()
    with suppress(OSError):  # another engine was faster
        made.replace(folder)
    shutil.rmtree(made, ignore_errors=True)


def main() -> None:
    if sys.argv[1] == "--new":
        try:
            make_head(Path(sys.argv[2]), Path(sys.argv[3]))
        except (SpecRolloutError, OSError) as error:
            raise SystemExit(getattr(error, "cause", str(error))) from None
        return
    duty = msgspec.json.decode(sys.argv[1], type=Duty)
    devices = together("train.devices", duty.devices)
    if devices is not None and devices.kind == "cpu":
        os.sched_setaffinity(0, devices.numbers)
    if torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(duty.memory_gib * (1 << 30) / total, 1.0))
    make_folder(Path(duty.dir))
    trainer = Trainer(duty)
    while os.getppid() == duty.parent:
        trainer.turn()


if __name__ == "__main__":
    main()
