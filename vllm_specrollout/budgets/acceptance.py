"""How likely a drafted node is accepted: what drafters say, corrected by what became of it.

What belongs here: counts per drafter and tenth of probability, and the factors for `merge_select` that follow.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_specrollout import _core
from vllm_specrollout.types import SOURCES, TENTHS, StepRecord

PRIOR = 20.0
"""Observations that the drafter's own word counts for."""
MEMORY = 0.999
"""Weight left to an observation after each further one of its kind."""
NEW_WEIGHTS = 0.5
"""Weight left to all observations when the policy's weights change."""


class Acceptance:
    """Accepted over expected, for each drafter and each tenth of the probability that it gives."""

    def __init__(self) -> None:
        # [SOURCES, TENTHS] nodes whose parents were accepted; what drafters expected of them; those accepted
        self._reached = np.zeros((SOURCES, TENTHS))
        self._expected = np.zeros((SOURCES, TENTHS))
        self._accepted = np.zeros((SOURCES, TENTHS))
        self._version: int | None = None

    def observe(self, record: StepRecord) -> None:
        """Learn from what was verified; a node whose parent was rejected says nothing."""
        if record.batch is not None and record.batch.views:
            self._weights_are(record.batch.views[0].weights_version)
        trees, result = record.trees, record.result
        if not trees.num_nodes:
            return
        columns = (trees.node_start, trees.parents, trees.log_q, trees.source)
        reached, expected, accepted, _, _ = _core.tally(*columns, result.num_accepted, result.accepted)
        kept = MEMORY**reached
        self._reached = self._reached * kept + reached
        self._expected = self._expected * kept + expected
        self._accepted = self._accepted * kept + accepted

    def calibration(self) -> npt.NDArray[np.float64]:
        """[SOURCES, TENTHS] factors on the drafters' probabilities; 1 where nothing is known.

        The prior weighs as observations of the kind's own mean probability, so that unlikely nodes are learned about as
        fast as likely ones.
        """
        claimed = self._expected / np.maximum(self._reached, 1e-9)
        told = PRIOR * np.where(self._reached > 0.0, claimed, 1.0)
        return (self._accepted + told) / (self._expected + told)

    def _weights_are(self, version: int) -> None:
        if self._version is not None and version != self._version:
            for counts in (self._reached, self._expected, self._accepted):
                counts *= NEW_WEIGHTS
        self._version = version
