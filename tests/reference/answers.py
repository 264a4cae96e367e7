"""What a store of answers is: a list with a window, and a reward for the latest answer of a name. Slow on purpose."""

from __future__ import annotations

import dataclasses

from vllm_specrollout.types import Answer


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

    def begin_epoch(self, epoch: int | None = None) -> int:
        """What came in a later one than is begun, which a call had named by mistake, is of this one."""
        self.epoch = self.epoch + 1 if epoch is None else epoch
        self._answers = [dataclasses.replace(one, epoch=min(one.epoch, self.epoch)) for one in self._answers]
        return self.epoch

    def lowest(self) -> int:
        """That may be begun: behind each earlier one with answers; the present one where only that has any."""
        held = {one.epoch for one in self._answers}
        earlier = [epoch for epoch in held if epoch < self.epoch]
        return max(earlier) + 1 if earlier else self.epoch if held else 0

    def _drafts(self, epoch: int, epochs: int) -> bool:
        """Fewer than so many earlier epochs that hold answers have come since, or none at all."""
        since = {one.epoch for one in self._answers if epoch < one.epoch < self.epoch}
        return epoch >= self.epoch or len(since) < epochs

    def report_reward(self, request_id: str, reward: float) -> bool:
        """Whether it counts: for an answer of this epoch or of the last one."""
        for place in reversed(range(len(self._answers))):
            answer = self._answers[place]
            if answer.request_id == request_id:
                counts = self._drafts(answer.epoch, min(1, self._epochs))
                self._answers[place] = dataclasses.replace(answer, reward=reward) if counts else answer
                return counts
        return False

    def answers(self, problem_id: str) -> list[Answer]:
        """Of the window, older epochs first."""
        found = [one for one in self._answers if one.problem_id == problem_id]
        return sorted((one for one in found if self._drafts(one.epoch, self._epochs)), key=lambda one: one.epoch)
