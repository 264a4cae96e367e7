"""What a store of answers is: a list with a window, and a reward for the latest answer of a name. Slow on purpose."""

from __future__ import annotations

import dataclasses

from vllm_specrollout.history.answers import Answer


class NaiveStore:
    """Keeps everything, in the order it came.

    Args:
        epochs: past ones whose answers are found.
    """

    def __init__(self, epochs: int) -> None:
        self._epochs, self.epoch = epochs, 0
        self._answers: list[Answer] = []

    def append(self, answer: Answer) -> None:
        self._answers.append(answer)

    def begin_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def report_reward(self, request_id: str, reward: float) -> bool:
        """Whether it counts: for an answer of this epoch or of the last one."""
        for place in reversed(range(len(self._answers))):
            answer = self._answers[place]
            if answer.request_id == request_id:
                counts = answer.epoch >= max(self.epoch - self._epochs, self.epoch - 1)
                self._answers[place] = dataclasses.replace(answer, reward=reward) if counts else answer
                return counts
        return False

    def answers(self, problem_id: str) -> list[Answer]:
        """Of the window, older epochs first."""
        found = [one for one in self._answers if one.problem_id == problem_id]
        return sorted((one for one in found if one.epoch >= self.epoch - self._epochs), key=lambda one: one.epoch)
