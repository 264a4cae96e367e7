"""How trainers have a running engine explain itself. Called by name, through `collective_rpc`, between steps."""

from __future__ import annotations

import time
from typing import Any

from vllm_specrollout.observe.timeline import TimelineListener


class ExplainsMixin:
    """Mixed into vLLM's workers, whose runner has a `spec_rollout`. Until it is asked, nothing is written down."""

    model_runner: Any

    def spec_rollout_explain(self, keep: int) -> None:
        """Write down what is decided for each request from now on.

        Of requests that ended, the last `keep` are told of; 0 ends the writing.
        """
        speculator = self.model_runner.spec_rollout
        speculator.listeners = [one for one in speculator.listeners if not isinstance(one, TimelineListener)]
        if keep > 0:
            speculator.listeners.append(TimelineListener(keep, time.perf_counter))

    def spec_rollout_explained(self) -> list[dict[str, Any]]:
        """What was written down since: per request its name, and its segments as plain values, in order."""
        # a step's record comes with its time, which is known when the next one begins
        self.model_runner.settle()
        listeners = self.model_runner.spec_rollout.listeners
        return next((one.rows() for one in listeners if isinstance(one, TimelineListener)), [])
