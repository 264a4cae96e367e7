"""What a step costs: milliseconds as a linear function of its rows, learned while the engine runs.

    step_ms = fixed + row * rows + draft * [any nodes] + branch * branches

Verification is memory bound at small batches, so `row` is small beside `fixed`: that is what speculation lives on
(FastGRPO section 3 and DAS measure the same line). The terms are fitted by least squares over recent decode steps,
with a pull towards proportions typical of such engines, so that a term which no recent step informs (drafting, after
it was off for a while) drifts back to its prior and gets another try.
"""

from __future__ import annotations

import numpy as np

from vllm_specrollout.types import StepTiming

PRIOR = np.asarray([1.0, 0.03, 0.05, 0.02])
"""Prior of (fixed, row, draft, branch) as shares of `fixed`: 2-core CPU, 150 M parameters, bf16, 1 to 32 rows."""

_PULL = np.asarray([0.01, 30.0, 1.0, 10.0])  # strength of the prior, in observations of one unit each
_MEMORY = 0.99  # weight left to an observation after each further one: about the last hundred steps count
_OUTLIER = 4.0  # a step this many times slower than predicted was disturbed by something else
_REFIT_EVERY = 8


class StepCost:
    """The fitted line. Terms are milliseconds and never negative."""

    def __init__(self) -> None:
        self._moments = np.zeros((4, 4))
        self._products = np.zeros(4)
        self._seen = 0
        self.fixed, self.row, self.draft, self.branch = PRIOR.tolist()

    @property
    def is_fitted(self) -> bool:
        """False until some steps have been seen: until then only the proportions of the terms mean anything."""
        return self._seen >= _REFIT_EVERY

    def predict(self, rows: int, nodes: int = 0, branches: int = 0) -> float:
        """Milliseconds of a decode step."""
        return self.fixed + self.row * rows + (self.draft if nodes else 0.0) + self.branch * branches

    def observe(self, timing: StepTiming) -> None:
        """Learn from a step; steps with prompt tokens in them follow another line and are left out."""
        if not timing.is_decode_only or timing.step_ms <= 0.0:
            return
        if self.is_fitted and timing.step_ms > _OUTLIER * self.predict(timing.rows, timing.nodes, timing.branches):
            return
        x = np.asarray([1.0, timing.rows, float(timing.nodes > 0), timing.branches])
        self._moments = _MEMORY * self._moments + np.outer(x, x)
        self._products = _MEMORY * self._products + x * timing.step_ms
        self._seen += 1
        if self._seen % _REFIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        # The prior's scale is what makes it agree best with the steps seen.
        explained = PRIOR @ self._moments @ PRIOR
        prior = PRIOR * max(float(PRIOR @ self._products / explained), 1e-6)
        terms = np.linalg.solve(self._moments + np.diag(_PULL), self._products + _PULL * prior)
        floor = 0.02 * prior
        self.fixed, self.row, self.draft, self.branch = np.maximum(terms, floor).tolist()
