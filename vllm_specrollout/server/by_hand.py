"""Training by hand: a head from a file of prompts and answers, by an engine and a trainer that are begun for it.

What belongs here: which answers are computed next, and when that is all. The file may grow meanwhile. Engine and
trainer are those that learn from a rollout; only, the answers come from elsewhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specrollout.errors import SpecRolloutError, UnsupportedError
from vllm_specrollout.replay.dump import Encode, read_answers
from vllm_specrollout.server.prefill import requests_of
from vllm_specrollout.training.answers import KeptAnswer, key_of
from vllm_specrollout.training.parent import Duty, Said, TrainerProcess

_BEAT_S, _PATIENCE_S = 0.05, 5.0
_CONTEXT = 4096  # tokens of the engine's context, at least: room for longer answers than are there yet


class HandTraining:
    """
    Args:
        duty: of the trainer; the engine computes what its head takes in.
        answers: a dump, which a rollout may still be writing.
        encode: makes tokens of its texts.
        target: configuration of the target.
        given: further arguments of the `LLM`.

    Raises:
        UnsupportedError: the file holds no answer.
        DumpError: it cannot be read, or a line is none.
    """

    def __init__(self, duty: Duty, answers: Path, encode: Encode, target: Any, **given: Any) -> None:
        self._duty, self._file, self._encode, self._target, self._given = duty, answers, encode, target, given
        self.waiting, self._read = list[KeptAnswer](), 0
        self._hear()
        if not self.waiting:
            raise UnsupportedError("the file holds no answer", "write a line for each answer first")
        self.done: dict[int, KeptAnswer] = {}
        """Answers that were computed, by their keys."""
        self._llm: Any = None
        self._length = 0

    def train(self, number: int, tell: Callable[[Said], None] = lambda said: None) -> Said:
        """Learn until no answer of the file is new, or nothing more comes of it; then publish the best head.

        Args:
            number: that the head gets.
            tell: told what the trainer does.

        Returns:
            What it said last of its judgement.

        Raises:
            UnsupportedError: none of the answers is held out, so that nothing could be said of the head.
            SpecRolloutError: the trainer cannot go on.
        """
        trainer = TrainerProcess(self._duty)

        def until(is_so: Callable[[Said], bool]) -> Said:
            while not is_so(said := trainer.hear()):
                if trainer.error:
                    raise SpecRolloutError(trainer.error, "see the trainer's messages above")
                tell(said)
                time.sleep(_BEAT_S)
            return said

        try:
            trainer.tell(learning=1)
            until(lambda said: said.wants_rows)
            while not trainer.said.ended and (portion := self._portion()):
                self._compute(trainer, portion)
                trainer.tell(is_halted=False)
                until(lambda said: not said.has_more or said.ended > 0)
                trainer.tell(is_halted=True)
            if not (judged := trainer.said).judged:
                raise UnsupportedError(
                    f"none of {len(self.done)} answers is held out to judge by; one of ten is", "give more answers"
                )
            trainer.tell(publish=number)
            if until(lambda said: number in (said.published, said.failed)).failed == number:
                raise SpecRolloutError(trainer.said.error, "see to the disk, and start again: nothing is lost")
            return judged
        finally:
            trainer.stop()
            if self._llm is not None:
                self._llm.llm_engine.engine_core.shutdown()

    def _hear(self) -> None:
        """The lines that came since."""
        new = read_answers(self._file, self._encode, self._read, self._target.vocab_size)
        for self._read, line, one in new:
            self.waiting.append(KeptAnswer(np.concatenate((one.prompt, one.answer)), len(one.prompt), line.version))

    def _portion(self) -> list[KeptAnswer]:
        """The next answers, as many as the memory takes; those of the newest two versions."""
        self._hear()
        newest = max((one.version for one in self.waiting), default=0)
        rows = int(self._duty.memory_gib * (1 << 30) / (4 * 4 * self._target.hidden_size))
        chosen: list[KeptAnswer] = []
        while self.waiting and rows > 0:
            answer = self.waiting.pop(0)
            if (key := key_of(answer.token_ids)) not in self.done and answer.version >= newest - 1:
                self.done[key] = answer
                chosen.append(answer)
                rows -= len(answer.token_ids)
        return chosen

    def _compute(self, trainer: TrainerProcess, answers: list[KeptAnswer]) -> None:
        """The trainer has the answers' rows afterwards; one that is longer than the target's context lacks its end."""
        if (longest := max(len(one.token_ids) for one in answers) + 1) > self._length:
            self._begin(longest)
        found = self._llm.collective_rpc("spec_rollout_answers", args=(trainer.duty.rows, 1))[0]
        most, before = self._length - 1, trainer.hear().answers
        own = [(min(one.prompt_tokens, most), key_of(one.token_ids), one.token_ids[:most].tolist()) for one in answers]
        prompts, params = zip(*requests_of({**found, "answers": own}), strict=True)
        self._llm.generate(list(prompts), list(params), use_tqdm=False)
        end = time.monotonic() + _PATIENCE_S
        while trainer.hear().answers < before + len(answers) and time.monotonic() < end:
            time.sleep(_BEAT_S)

    def _begin(self, length: int) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm import LLM

        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._length = min(getattr(self._target, "max_position_embeddings", length), max(2 * length, _CONTEXT))
        own: dict[str, Any] = {"drafters": ["ngram"], "profile": "off", "train": {"prefill_tokens": 1 << 14}}
        if self._duty.method == "eagle3":
            own |= {"speculative_config": {"method": "eagle3", "model": self._duty.head, "num_speculative_tokens": 2}}
        self._llm = LLM(
            **{
                "model": self._duty.target,
                "max_model_len": self._length,
                "additional_config": {"spec_rollout": own},
                "enforce_eager": True,
                "enable_prefix_caching": False,
                # the trainer has its share of a GPU beside it
                "gpu_memory_utilization": 0.5,
                **self._given,
            }
        )
