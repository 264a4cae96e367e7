"""Signs of life: lines of the log that say what drafting brings, whatever vLLM's own statistics are set to. Pure.

One line a minute while requests run, and one when the last of them is over. What it says is of the time since the line
before it; tokens per step are of all steps, those without drafts among them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from vllm_specrollout.observe.gain import Gain
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import FinishedRequest, RequestView, StepRecord

logger = logging.getLogger("vllm.specrollout")

EVERY_S = 60.0
LEAST_S = 10.0
"""Of a rollout that is shorter nothing is said: a server's single requests would fill the log."""


class Signs(Listener):
    """
    Args:
        say: takes the line.
        clock: seconds, from any zero.
    """

    def __init__(self, say: Callable[[str], None] = logger.info, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._running: set[str] = set()
        self._gain, self._drafted, self._accepted = Gain(), 0, 0
        # when the first step was over that the next line is about
        self._since: float | None = None

    def admitted(self, view: RequestView) -> None:
        self._running.add(view.request_id)

    def finished(self, ending: FinishedRequest) -> None:
        self._running.discard(ending.request_id)
        if not self._running and self._since is not None and self._clock() - self._since >= LEAST_S:
            self._tell("rollout over")

    def stepped(self, record: StepRecord) -> None:
        self._gain.add(record)
        self._drafted += record.trees.num_nodes
        self._accepted += len(record.result.accepted)
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since >= EVERY_S:
            self._tell(f"{len(self._running)} requests run")

    def _tell(self, what: str) -> None:
        gain, share = self._gain, self._accepted / max(self._drafted, 1)
        if gain.request_steps:
            times = f", {gain.speedup:.2f} times plain decoding by estimate" if gain.is_known else ""
            drafts = f"{share:.0%} of {self._drafted} draft tokens accepted" if self._drafted else "no drafts"
            self._say(f"Spec rollout: {what}; {gain.tokens_per_step:.2f} tokens a step, {drafts}{times}")
        self._gain, self._drafted, self._accepted, self._since = Gain(), 0, 0, None
