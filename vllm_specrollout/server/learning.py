"""Learning: keeps the head of one engine true to its policy. It hears the engine, asks `spot.decide`, and does that.

What belongs here: the one loop, for engines that are awaited and for those that are called, and what is made before an
engine starts. Engines that share a folder share a trainer: who has its lock leads, the others prefill while it takes
rows, and all load what appears there. No engine fails or waits for what happens here.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from vllm_specrollout.config import SpecRolloutConfig, envs
from vllm_specrollout.config.checks import check_range
from vllm_specrollout.config.places import make_folder, new_file
from vllm_specrollout.errors import ConfigError, SpecRolloutError, UnsupportedError
from vllm_specrollout.server import settings
from vllm_specrollout.server.asking import Call, Conversation, aask, ask, check_has_model
from vllm_specrollout.server.prefill import aprefill, prefill
from vllm_specrollout.server.reports import WeightsError, loading

logger = logging.getLogger("vllm.specrollout")

LEVELS = 10
"""Tokens of a draft by a head that is made here."""
_TRAINED_LEVELS = 6
_TURN_TOKENS = 1 << 16
_KEPT = 3  # heads that were published
_BEAT_S, _SELDOM_S = 0.2, 2.0
_PATIENCE = 5  # beats without anything to do
_WRITE_S = 60.0  # a head is waited for


class HeadLearning:
    """
    Args:
        config: of the engine.
        target: the policy's folder or name.
        clock: seconds, from any zero.
    """

    def __init__(self, config: SpecRolloutConfig, target: str, clock: Callable[[], float] = time.monotonic) -> None:
        from vllm_specrollout.training import parent, spot

        self._parent, self._spot, self._config, self._target, self.clock = parent, spot, config, target, clock
        self.folder = Path(config.train.dir)
        self.address = parent.rows_address(config.train.dir)
        make_folder(self.folder)
        self._lock: IO[bytes] | None = None
        self._trainer: Any = None
        self._rates = spot.MatchRates()
        self._engine = spot.HeardEngine(spot.Doing.IDLE, clock(), has_answers=True)
        # the head that serves and its parent, by number, the highest that was ever loaded, and returns that were heard
        self.number = self.parent = self._loaded = self._returns = 0
        self._ended = 0
        # version of output head and embedding that the trainer has, and its process
        self._ends, self._ends_of = 0, None
        # requests that come are the engine's own
        self._is_asking = False
        self.holds = False
        """Heads are published later: nothing says meanwhile what one is worth in this engine."""

    # --- the loop ----------------------------------------------------------------------------------------------------

    def beat(self, is_busy: bool) -> Conversation[bool]:
        """Hear, decide, do; returns whether the engine shall compute answers now."""
        found = [one for workers in (yield Call("spec_rollout_head", (self.as_dict(),))) for one in workers if one]
        if not found:
            return False
        self._hear(found[0], is_busy)
        heard = self._heard()
        actions = self._spot.decide(heard)
        for action in actions:
            if not (self.holds and isinstance(action, self._spot.Publish)):
                self._do(action)
        number = max(self._parent.numbers_in(self.folder), default=0)
        if number > self._loaded and not found[0]["is_asleep"]:
            yield from self._load(number)
        if not any(isinstance(one, self._spot.Prefill) for one in actions):
            return False
        if self._trainer is not None and self._ends_of != self._trainer.pid:
            self._ends, self._ends_of = 0, self._trainer.pid
        answers = yield Call("spec_rollout_ends", (self.address, self._ends))
        self._ends = max(one for workers in answers for one in workers)
        self._is_asking = True
        return True

    def turned(self, done: Mapping[str, int], seconds: float) -> None:
        """The engine has computed answers once more, or was kept from it."""
        self._is_asking = False
        left = done["asked"] > 0
        self._engine = replace(self._engine, has_answers=left, turn_s=seconds if left else self._engine.turn_s)

    def arrived(self) -> None:
        """A request has come: a trainer that has the engine's device is halted at once."""
        if self._is_asking:
            return
        self._engine = replace(self._engine, has_answers=True)
        if self._engine.doing is not self._spot.Doing.BUSY:
            self._is(self._spot.Doing.BUSY)
            if self._trainer is not None and not self._config.train.devices:
                self._trainer.tell(is_halted=True)

    @property
    def pause_s(self) -> float:
        return _BEAT_S if self.is_learning and self._engine.doing is not self._spot.Doing.BUSY else _SELDOM_S

    @property
    def is_learning(self) -> bool:
        if self._trainer is not None and self._trainer.error:
            return False
        return self._heard().trainer.is_learning or self._spot.needs_learning(self._engine)

    @property
    def is_waiting(self) -> bool:
        """Whether nothing goes on until further answers come; rows may still be on their way."""
        own, engine = self._trainer, self._engine
        if own is None:
            return not self.is_learning or not self._leads()
        is_out = own.said.wants_rows and not own.said.has_more and not engine.has_answers
        return not self.is_publishing and (is_out or not self.is_learning)

    @property
    def is_publishing(self) -> bool:
        """Whether the trainer writes a head."""
        return self._trainer is not None and self._heard().trainer.is_publishing

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.stop()
        if self._lock is not None:
            self._lock.close()
        self._trainer = self._lock = None

    # --- what is heard -----------------------------------------------------------------------------------------------

    def _hear(self, head: Mapping[str, Any], is_busy: bool) -> None:
        doing, trainer = self._spot.Doing, self._trainer
        self._rates.hear(head["positions"], head["met"])
        if trainer is not None and (said := trainer.hear()).ended > self._ended:
            self._ended = said.ended
            self._rates.begin_anew()
        trains = self._trains and not self._config.train.devices
        is_busy = is_busy or head["is_asleep"]
        now = doing.BUSY if is_busy else doing.DRAFTING if head["is_lent"] else doing.TRAINING if trains else doing.IDLE
        if is_busy:
            self._engine = replace(self._engine, has_answers=True)
        self._is(now)
        self._engine = replace(
            self._engine,
            has_head=head["is_trained"],
            rate_then=self._rates.then,
            rate_now=self._rates.now,
            went_back=head["went_back"],
        )
        if head["went_back"] > self._returns:
            self._returns, self.number = head["went_back"], self.parent
            self._rates.begin_anew()

    @property
    def _trains(self) -> bool:
        own = self._trainer
        return own is not None and not own.wish.is_halted and own.wish.learning > own.said.ended

    def _is(self, doing: Any) -> None:
        if doing is not self._engine.doing:
            self._engine = replace(self._engine, doing=doing, since=self.clock())

    def _heard(self) -> Any:
        spot, own = self._spot, self._trainer
        if own is None:
            # of another process's trainer, only that it takes rows
            has_listener = not self._leads() and Path(self.address.removeprefix("ipc://")).exists()
            trainer = spot.HeardTrainer(is_learning=has_listener, wants_rows=has_listener)
        else:
            said, wish = own.said, own.wish
            trainer = spot.HeardTrainer(
                is_learning=wish.learning > said.ended,
                is_halted=not self._trains,
                wants_rows=said.wants_rows,
                step_s=said.step_s,
                own=said.own,
                serving=said.serving,
                levels=own.duty.num_levels,
                is_publishing=wish.publish > max(said.published, said.failed),
                backs=wish.backs,
            )
        leader = 0 if self._leads() else None
        return spot.Heard(self.clock(), (self._engine,), trainer, leader, bool(self._config.train.devices))

    def _leads(self) -> bool:
        """Whether this process is the one that has a trainer: the first one that asked."""
        if self._trainer is not None and self._trainer.error:
            return False
        if self._lock is None:
            lock = new_file(self.folder / "lock")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                return False
            self._lock = lock
        return True

    # --- what is done ------------------------------------------------------------------------------------------------

    def _do(self, action: Any) -> None:
        spot = self._spot
        if isinstance(action, spot.Train):
            trainer = self._begun()
            is_new = trainer.wish.learning <= trainer.said.ended
            trainer.tell(is_halted=False, learning=trainer.wish.learning + is_new)
        elif isinstance(action, spot.Halt):
            self._trainer.tell(is_halted=True)
        elif isinstance(action, spot.Publish):
            self._trainer.tell(publish=max(self._trainer.wish.publish, self._loaded) + 1)
        elif isinstance(action, spot.Back) and self._trainer is not None:
            shutil.rmtree(self.folder / str(self._loaded), ignore_errors=True)
            self._trainer.tell(backs=self._engine.went_back)
            self._trainer.serves(self._head(self.number))

    def _begun(self) -> Any:
        if self._trainer is None:
            given = self._config.speculative_config or {}
            levels = min(max(int(given.get("num_speculative_tokens", LEVELS)), 2), _TRAINED_LEVELS)
            done = self._parent.Wish(publish=self._loaded, backs=self._returns)
            duty = self._parent.Duty(
                target=self._target,
                dir=str(self.folder),
                head=str(self._head(self.number)),
                is_new=not self._engine.has_head,
                method=str(given["method"]),
                num_levels=levels,
                memory_gib=self._config.train.memory_gib,
                devices=self._config.train.devices,
                done=done,
            )
            self._trainer = self._parent.TrainerProcess(duty)
        return self._trainer

    def _head(self, number: int) -> Path:
        return self.folder / str(number) if number else Path((self._config.speculative_config or {})["model"])

    def _load(self, number: int) -> Conversation[None]:
        """Whatever comes of it, this one is not tried again."""
        self._loaded = number
        try:
            yield from loading(self._head(number))
        except WeightsError as error:
            why = f"head {number} cannot be loaded: {error.cause}"
            if self._trainer is not None:
                self._trainer.give_up(why)  # nor would another one
            else:
                logger.warning("Spec rollout: %s", why)
            return
        self.number, self.parent = number, self.number
        self._rates.begin_anew()
        logger.info("Spec rollout: head %d drafts from now on", number)
        if self._trainer is not None:
            self._trainer.serves(self._head(number))
            for old in self._parent.numbers_in(self.folder)[:-_KEPT]:
                if old and old not in (self.number, self.parent):
                    shutil.rmtree(self.folder / str(old), ignore_errors=True)
        # an engine that is called may hear nothing more for long
        yield Call("spec_rollout_head", (self.as_dict(),))

    def as_dict(self) -> dict[str, int]:
        """What is shown of head and trainer; `observe.metrics` shows it by names of its own."""
        said = None if self._trainer is None else self._trainer.said
        state = "training" if self._trains else "halted" if said and self._heard().trainer.is_learning else "resting"
        return {
            "number": self.number,
            "parent": self.parent,
            "went_back": self._returns,
            "head_match_rate/at publication": round(self._rates.then.share * 1000),
            "head_match_rate/now": round(self._rates.now.share * 1000),
            **{f"trainer_state/{name}": int(name == state) for name in ("resting", "halted", "training")},
            "trainer_rows": 0 if said is None else said.rows,
            "trainer_seconds": 0 if said is None else round(said.seconds),
        }


# --- for engines that are awaited, in the background -----------------------------------------------------------------


def attend(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap `AsyncLLM._run_output_handler`, which every request passes: where `train` is `auto`, a task attends to the
    engine from the first call on."""

    @functools.wraps(original)
    def _run_output_handler(self: Any) -> None:
        original(self)
        if "spec_rollout_learning" in vars(self):
            if self.spec_rollout_learning is not None:
                self.spec_rollout_learning.arrived()
            return
        # of several front ends, the first one attends
        is_first = getattr(self.engine_core, "client_index", 0) == 0
        self.spec_rollout_learning = learning = None
        try:
            self.spec_rollout_learning = learning = _learning_of(self) if is_first else None
        except OSError as error:
            logger.warning("Spec rollout: the head does not learn: %s", error)
        if learning is not None:
            self.spec_rollout_attending = asyncio.get_running_loop().create_task(_attend(weakref.ref(self), learning))

    return _run_output_handler


async def _attend(ref: Callable[[], Any], learning: HeadLearning) -> None:
    try:
        while (engine := ref()) is not None and not engine.output_handler.done():
            is_busy = engine.output_processor.has_unfinished_requests() or await engine.is_paused()
            if await aask(engine, learning.beat(is_busy), check_has_model):
                begin = learning.clock()
                learning.turned(await aprefill(engine, learning.address, _TURN_TOKENS), learning.clock() - begin)
            del engine
            await asyncio.sleep(learning.pause_s)
    except Exception as error:
        cause = error.cause if isinstance(error, SpecRolloutError) else repr(error)
        if (engine := ref()) is not None and not engine.errored:
            logger.warning("Spec rollout: the head learns no more: %s", cause)
    finally:
        learning.close()


# --- for engines that are called -------------------------------------------------------------------------------------


def learn(llm: Any, seconds: float = 60.0) -> dict[str, int]:
    """Have the head of an `LLM` learn from what was answered: call it between two `generate`s.

    It returns once nothing is to be learned. The best head of the call drafts from its end on, if it is better than the
    one before. Where the trainer has `train.devices` of its own, it goes on behind.

    Args:
        llm: started with `{"train": "auto"}`.
        seconds: the most that it may take, but for the writing of a head.

    Returns:
        "number" of the head that drafts, and of its "parent"; times that it "went_back"; and what the metrics
        `head_match_rate`, `trainer_state` and `trainer_work` say.

    Raises:
        ConfigError, UnsupportedError: it is no such engine, or its answers cannot be computed once more.
    """
    check_range("seconds", seconds, 0.0, 86400.0)
    learning = getattr(llm, "spec_rollout_learning", None) or _learning_of(llm.llm_engine)
    if learning is None:
        raise UnsupportedError("this engine's `train` is not `auto`", 'start it with {"train": "auto"}')
    if not hasattr(llm, "spec_rollout_learning"):
        llm.spec_rollout_learning = learning
        weakref.finalize(llm, learning.close)
    until, waited = learning.clock() + seconds, 0
    learning.holds = True
    while learning.holds or (learning.is_publishing and learning.clock() < until + _WRITE_S):
        # the best head of them all, in time for the next requests
        learning.holds = waited < _PATIENCE and learning.clock() < until
        if ask(llm, learning.beat(False), check_has_model):
            begin = learning.clock()
            learning.turned(prefill(llm, learning.address, _TURN_TOKENS), learning.clock() - begin)
        waited = waited + 1 if learning.is_waiting else 0
        time.sleep(_BEAT_S)
    learning.arrived()
    return learning.as_dict()


def _learning_of(engine: Any) -> HeadLearning | None:
    config = settings.config_of(engine.vllm_config)
    if config is None or config.train.mode != "auto":
        return None
    return HeadLearning(config, engine.vllm_config.model_config.model)


# --- before an engine starts -----------------------------------------------------------------------------------------


def prepared(config: SpecRolloutConfig, target: str) -> SpecRolloutConfig:
    """With its folder, and with an untrained head where it has none.

    Raises:
        ConfigError, UnsupportedError: no head learns there.
    """
    if config.train.mode != "auto":
        return config
    if importlib.util.find_spec("speculators") is None:
        raise UnsupportedError(
            "`train` is `auto`, and its trainer needs `speculators`, which is not installed",
            'run `pip install "vllm-specrollout[train]"`, or leave `train` out',
        )
    given = config.speculative_config
    if given is not None and given.get("method") not in ("eagle", "eagle3"):
        raise ConfigError(
            f"`train` is `auto`, and the model that drafts has method {given.get('method')!r}",
            "name the method `eagle` or `eagle3`, or leave `speculative_config` out",
        )
    name = os.path.realpath(target) if os.path.exists(target) else target
    key = hashlib.blake2b(f"{name}\n{(given or {}).get('model', '')}".encode(), digest_size=8).hexdigest()
    folder = Path(config.train.dir or envs.cache_dir() / "heads" / key)
    if given is None:
        first = folder / "0"
        if not (first / "config.json").is_file():
            _make_head(target, first)
        given = {"method": "eagle3", "model": str(first), "num_speculative_tokens": LEVELS}
    return replace(config, speculative_config=given, train=replace(config.train, dir=str(folder)))


def _make_head(target: str, folder: Path) -> None:
    # in a process of its own: this one has no use for what it imports
    argv = [sys.executable, "-m", "vllm_specrollout.training.process", "--new", target, str(folder)]
    own = {name: value for name, value in os.environ.items() if name not in (envs.SPEC_ROLLOUT, "TRITON_INTERPRET")}
    done = subprocess.run(argv, env=own, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it was killed"]
        raise UnsupportedError(
            f"no head can be made for `{target}`: {said[-1]}",
            "train one by hand (`specrollout train-head`), or drop `train`",
        )
