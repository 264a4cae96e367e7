"""How far a drafter's probabilities can be believed, learned from what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_specrollout.types import ROOT, DraftTree, Feedback, FloatArray

_BUCKETS = 10  # of probability, equally wide
_PRIOR_WEIGHT = 20.0  # observations that the drafter's own word counts for
_MEMORY = 0.9995  # weight left to an observation after each further one of the same bucket


class Calibration:
    """Maps each drafter's probabilities to observed acceptance, per bucket of probability."""

    def __init__(self, num_sources: int = 8) -> None:
        self._accepted = np.zeros((num_sources, _BUCKETS))
        self._claimed = np.zeros((num_sources, _BUCKETS))  # sum of the probabilities claimed

    def log_probability(self, tree: DraftTree) -> FloatArray:
        """[N] calibrated log_q of the tree's nodes."""
        claimed = np.exp(tree.log_q.astype(np.float64))
        at = (tree.source, _bucket(claimed))
        # Observed over claimed, both with a prior that says they are equal: 1 where nothing has been seen.
        prior = _PRIOR_WEIGHT * np.maximum(claimed, 0.05)
        factor = (self._accepted[at] + prior) / (self._claimed[at] + prior)
        return np.log(np.clip(claimed * factor, 1e-6, 1.0)).astype(np.float32)

    def observe(self, feedback: Sequence[Feedback]) -> None:
        """Count the nodes the target reached: those whose parent was accepted (or is the root)."""
        for item in feedback:
            accepted = set(item.accepted_nodes.tolist())
            claimed = np.exp(item.log_q.astype(np.float64))
            buckets = _bucket(claimed)
            for node, parent in enumerate(item.parents.tolist()):
                if parent != ROOT and parent not in accepted:
                    continue
                at = (int(item.source[node]), int(buckets[node]))
                self._claimed[at] = _MEMORY * self._claimed[at] + claimed[node]
                self._accepted[at] = _MEMORY * self._accepted[at] + float(node in accepted)


def _bucket(probability: np.ndarray) -> np.ndarray:
    return np.minimum((probability * _BUCKETS).astype(np.int64), _BUCKETS - 1)
