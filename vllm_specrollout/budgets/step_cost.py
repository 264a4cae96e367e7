"""What a decode step costs in milliseconds, learned while the engine runs.

What belongs here: from what a step did to how long it takes. Not what to do about it.

    step_ms = fixed + request * requests + node * nodes + branch * branches + context * context tokens / 1024
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specrollout.types import StepTiming

Array = npt.NDArray[np.float64]

# shares of the fixed part before anything is seen, and how far an engine may be from them
_TYPICAL: Array = np.asarray([1.0, 0.03, 0.027, 0.015, 0.002])
_SPREAD: Array = np.asarray([0.5, 0.05, 0.05, 0.02, 0.01])
_NOISE = 0.05
_MEMORY = 0.995


class StepCost:
    """A line fitted by least squares in relative error. No term is ever negative."""

    def __init__(self) -> None:
        self._moments = np.zeros((len(_TYPICAL), len(_TYPICAL)))
        self._products = np.zeros(len(_TYPICAL))
        self._terms = _TYPICAL.copy()

    def plain_ms(self, num_requests: int, context: int = 0) -> float:
        """Milliseconds of a step without drafts."""
        return float(self._terms @ (1.0, num_requests, 0.0, 0.0, context / 1024.0))

    def added_ms(self, num_requests: int, num_nodes: int) -> Array:
        """[num_nodes + 1] milliseconds that 0, 1, ... `num_nodes` draft nodes add to a step of so many requests."""
        return np.asarray(self._terms[2] * np.arange(num_nodes + 1))

    @property
    def branch_ms(self) -> float:
        """Milliseconds of one root-to-leaf path beyond a request's first."""
        return float(self._terms[3])

    def predict(self, num_requests: int, num_nodes: int, branches: int = 0, context: int = 0) -> float:
        """Milliseconds of a step."""
        drafts = float(self.added_ms(num_requests, num_nodes)[-1])
        return self.plain_ms(num_requests, context) + drafts + self.branch_ms * branches

    def observe(self, timing: StepTiming) -> None:
        """Learn from a step; one with prompt tokens in it follows another line and is left out."""
        if not timing.is_decode_only or timing.step_ms <= 0.0:
            return
        x = np.asarray([1.0, timing.batch, timing.nodes, timing.branches, timing.context / 1024.0]) / timing.step_ms
        self._moments = _MEMORY * self._moments + np.outer(x, x)
        self._products = _MEMORY * self._products + x
        scale = max(float(_TYPICAL @ self._products) / float(_TYPICAL @ self._moments @ _TYPICAL), 1e-9)
        pull = np.diag(1.0 / _SPREAD**2)
        known = self._moments * (scale / _NOISE) ** 2 + pull
        terms = np.linalg.solve(known, self._products * (scale / _NOISE**2) + pull @ _TYPICAL)
        self._terms = scale * np.maximum(terms, 0.0)

    def seed(self, timings: Sequence[StepTiming]) -> None:
        """Start from steps measured earlier on such an engine."""
        for timing in timings:
            self.observe(timing)
