"""Training by hand: a head from a file of prompts and answers, in one run that may be killed and started again.

What belongs here: which answers are computed next, when the head is judged and saved, and what is told in the end. The
file may grow meanwhile: a run ends when no answer in it is new. Its state is the learner's, beside the head; whichever
answers are there when it goes on, those that it has done with are left out.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from vllm_specrollout.config.checks import Choice, Range, check_fields
from vllm_specrollout.errors import ConfigError, UnsupportedError

from .answer_file import AnswerFile
from .answers import KeptAnswer, digest_of
from .heads import Source, layers_of, load_eagle, load_head, new_eagle, new_head, save_eagle, save_head, target_ends
from .learner import NEW_RATE, TRAINED_RATE, HeadJudgement, Learner, LearnerConfig
from .rows import Rows
from .spot import WORTH

STATE, METRICS = "training.pt", "training.jsonl"
METHODS = ("eagle3", "eagle")
_FORMAT = 3  # of the state
_MAY_CHANGE = ("threads", "judge_rows", "memory_gib")  # when a run goes on
Prefill = Callable[[Path, tuple[int, ...], Sequence[KeptAnswer]], Iterator[Rows]]
"""(target, layers, answers) -> what the target computes for each answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A run, beside what its learner depends on."""

    method: Annotated[str, Choice(METHODS)] = "eagle3"
    """`eagle3` (a head over several layers' hidden states, with an output head of its own) or `eagle` (over the last
    one's, with the target's output head)."""
    rate: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Learning rate; 0: 3e-4 for a head that was trained, 1e-3 for a new one."""
    draft_vocab: Annotated[int, Range(0, 1 << 24)] = 0
    """`eagle3` only: tokens that a new head may draft, the most frequent ones; 0: all."""
    judge_rows: Annotated[int, Range(64, 1 << 30)] = 16384
    """Rows between two judgements. Each saves the run's state, and the head if it is the best so far."""
    memory_gib: Annotated[float, Range(0.0001, 4096.0)] = 4.0
    """Hidden states in memory at a time; with more answers, they are computed in turns."""
    threads: Annotated[int, Range(0, 4096)] = 0
    """Of torch; 0: as many as it takes by itself."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.method != "eagle3" and self.draft_vocab:
            raise ConfigError(
                f"`draft_vocab` is {self.draft_vocab}, and an `{self.method}` head has its target's output head",
                "leave `draft_vocab` out, or train an `eagle3` head",
            )


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of a run."""

    # of the head that is kept, and of the one that the run began with
    kept: HeadJudgement
    first: HeadJudgement
    # answers that were learned from or judged by, rows and steps in all
    answers: int
    rows: int
    steps: int

    @property
    def is_useful(self) -> bool:
        return self.kept.accepted >= WORTH * len(self.kept.met)


class HeadRun:
    """One run.

    Args:
        target: the target's folder.
        answers: the file.
        out: the head's folder; the run's state is kept there too.
        prefill: computes hidden states.
        start: a head to train further; None: a new one.

    Raises:
        ConfigError, UnsupportedError: see `new_head`, `load_head`; or `out` holds the state of another run.
    """

    def __init__(
        self,
        target: Path,
        answers: AnswerFile,
        out: Path,
        config: TrainConfig,
        learner: dict[str, Any],
        prefill: Prefill,
        *,
        start: Path | None = None,
    ) -> None:
        self.target, self.out, self.config = target, out, config
        self._answers, self._prefill = answers, prefill
        rate = config.rate or (NEW_RATE if start is None else TRAINED_RATE)
        own = LearnerConfig(**learner, rate=rate)
        about = {**asdict(config), **asdict(own), "start": str(start or ""), "format": _FORMAT}
        self._about = {name: about[name] for name in sorted(set(about) - set(_MAY_CHANGE))}
        state = self._state()
        torch.manual_seed(own.seed)
        if config.threads:
            torch.set_num_threads(config.threads)
        self._waiting = answers.unread()
        if not self._waiting:
            raise UnsupportedError("the file holds no answer", "write a line for each answer first")
        layers, hidden_size = shape_of(target, start)
        self.source = Source(str(target), layers if config.method == "eagle3" else (), hidden_size)
        self.learner = Learner(self._head(start, own.num_levels), target_ends(target)[1], own)
        self._best: dict[str, torch.Tensor] = {}
        self._kept: HeadJudgement | None = None
        self._judged_by: set[bytes] = set()
        self._offered: set[bytes] = set()
        self.first: HeadJudgement | None = None
        if state:
            self.learner.load_state_dict(state["learner"])
            self.first = HeadJudgement(**state["first"])
            self._best = state["best"]
        self._begin = time.perf_counter() - float(state.get("seconds", 0.0))

    def train(self, on_step: Callable[[Learner, float], None] = lambda learner, loss: None) -> Trained:
        """Learn from all answers, and from those that come meanwhile; keep the best head.

        Args:
            on_step: told each step's loss.

        Raises:
            UnsupportedError: none of the answers is held out, so that nothing could be said of the head.
        """
        learner, judged_at = self.learner, self.learner.rows
        while portion := self._portion():
            for rows in self._prefill(self.target, self.source.layers, portion):
                learner.add(rows)
            if not learner.windows.held_out():
                raise UnsupportedError(
                    f"none of {len(portion)} answers is held out to judge by; one of ten is", "give more answers"
                )
            if self.first is None:
                self.first = self._judge(0.0)
            loss = 0.0
            while (found := learner.step()) is not None:
                loss = found
                on_step(learner, loss)
                if learner.rows - judged_at >= self.config.judge_rows:
                    judged_at = learner.rows
                    self._judge(loss)
            learner.windows.drop_done()
            self._judge(loss)
        assert self._kept is not None and self.first is not None
        return Trained(self._kept, self.first, len(self._offered), learner.rows, learner.steps)

    # --- answers -----------------------------------------------------------------------------------------------------

    def _portion(self) -> list[KeptAnswer]:
        """The next answers to be computed, as many as the memory takes; none: all are done."""
        self._waiting += self._answers.unread()
        rows = int(self.config.memory_gib * (1 << 30) / (4 * (len(self.source.layers) + 1) * self.source.hidden_size))
        chosen: list[KeptAnswer] = []
        while self._waiting and rows > 0:
            answer = self._waiting.pop(0)
            digest = digest_of(answer.token_ids)
            if digest in self._offered or self.learner.windows.is_done(digest):
                continue
            self._offered.add(digest)
            chosen.append(answer)
            rows -= len(answer.token_ids)
        return chosen

    # --- the head ----------------------------------------------------------------------------------------------------

    def _head(self, start: Path | None, num_levels: int) -> Any:
        if self.config.method == "eagle":
            return new_eagle(self.target, self.source) if start is None else load_eagle(start, self.target, self.source)
        if start is None:
            return new_head(self.target, self.source, num_levels, self._draft_vocab())
        return load_head(start, self.source)

    def _draft_vocab(self) -> list[int] | None:
        if not self.config.draft_vocab:
            return None
        counts = torch.zeros(target_ends(self.target)[1].shape[0], dtype=torch.int64)
        for answer in self._waiting:
            own = torch.from_numpy(answer.token_ids[answer.prompt_tokens :]).long()
            counts.index_add_(0, own, torch.ones_like(own))
        # what was never sampled comes last, in the order of the ids
        most = counts.argsort(descending=True, stable=True)[: self.config.draft_vocab]
        return sorted(most.tolist())

    def _judge(self, loss: float) -> HeadJudgement:
        """Judge the head, and save what has to be."""
        learner = self.learner
        judges = {digest_of(one.token_ids.numpy()) for one in learner.windows.held_out()}
        found = learner.judge()
        if judges != self._judged_by and self._best:  # other answers judge now: the best one's figure is of no use
            now = copy.deepcopy(learner.head.state_dict())
            learner.head.load_state_dict(self._best)
            self._kept = learner.judge()
            learner.head.load_state_dict(now)
        self._judged_by = judges
        if self._kept is None or found.accepted > self._kept.accepted:
            self._kept, self._best = found, copy.deepcopy(learner.head.state_dict())
            (save_eagle if self.config.method == "eagle" else save_head)(
                learner.head, self.out, saved_dtype(learner.head)
            )
        self._save_state(found, loss)
        return found

    # --- state -------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """The saved one, empty if there is none. Raises: ConfigError, it is another run's."""
        path = self.out / STATE
        if not path.exists():
            return {}
        state: dict[str, Any] = torch.load(path, weights_only=True)
        if state.get("about") != self._about:
            about = state.get("about", {})
            changed = [name for name in self._about if about.get(name) != self._about[name]]
            raise ConfigError(
                f"`{path}` is of another run: {', '.join(changed)} differ",
                "choose another --out, or delete that file to begin anew",
            )
        return state

    def _save_state(self, found: HeadJudgement, loss: float) -> None:
        learner, seconds = self.learner, time.perf_counter() - self._begin
        state = {"about": self._about, "learner": learner.state_dict(), "best": self._best, "seconds": seconds}
        state["first"] = asdict(self.first or found)
        partial = self.out / f"{STATE}.partial"
        torch.save(state, partial)
        # in one move, so that a run killed meanwhile leaves a whole one
        partial.replace(self.out / STATE)
        line: dict[str, Any] = {"step": learner.steps, "rows": learner.rows, "loss": loss, "accepted": found.accepted}
        line |= {"met": found.met, "seconds": seconds}
        with (self.out / METRICS).open("a", encoding="utf-8") as metrics:
            metrics.write(json.dumps(line) + "\n")


def saved_dtype(head: Any) -> torch.dtype:
    """That of its target's checkpoint."""
    config = getattr(head.config, "transformer_layer_config", head.config)
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def shape_of(target: Path, start: Path | None) -> tuple[tuple[int, ...], int]:
    """Layers whose hidden states a head takes, and how many values each has."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(target))
        config = getattr(config, "text_config", config)
        about = {} if start is None else json.loads((start / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{target}` or `{start}` is no model: {error}", "give folders of models") from None
    layers = about.get("eagle_aux_hidden_state_layer_ids") or layers_of(config.num_hidden_layers)
    return tuple(layers), config.hidden_size
