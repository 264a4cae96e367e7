"""Prefills: what an engine's prompts cost it, by its own steps. Pure.

A step with rows of prompts takes longer than one without. What it takes longer is theirs, however many requests were
given at once and however long they waited.
"""

from __future__ import annotations

from collections import deque

from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import StepRecord, StepTiming

_WAITING = 64  # steps with prompts that are kept until it is known what one without them takes


class Prefills(Listener):
    """Sums over an engine's steps."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0
        """Of prompts, or of what was computed anew; and what they took beyond steps without them."""
        self._cost = StepCost()
        self._waiting: deque[StepTiming] = deque(maxlen=_WAITING)

    def stepped(self, record: StepRecord) -> None:
        timing = record.timing
        if timing is None:
            return
        if timing.is_decode_only:
            self._cost.observe(timing)
        else:
            self._waiting.append(timing)
        while self._waiting and self._cost.is_known:
            self._add(self._waiting.popleft())

    def _add(self, step: StepTiming) -> None:
        # a request whose prompt is computed gets a token as well, so one of its rows is that of a plain step
        rows = step.rows - step.nodes - step.batch
        if rows > 0:
            more_ms = step.step_ms - step.ask_ms - self._cost.predict(step.batch, step.nodes, step.branches)
            self.tokens, self.seconds = self.tokens + rows, self.seconds + max(more_ms, 0.0) / 1e3
