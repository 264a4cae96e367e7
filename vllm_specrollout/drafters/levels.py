"""Levels that a model drafts in one step, and the trees that they make. Pure.

Each level has the chain's token, from which the model goes on, and the next likeliest ones beside it: alternatives. So
a model's chain becomes a comb, at the price of the chain. How likely a token is says the model's coupling.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_specrollout.trees.batch import proposed
from vllm_specrollout.types import ROOT, DraftLimits, IntArray, RequestBatch, TreeBatch


class Levels:
    """The levels drafted so far, for R requests.

    Args:
        num_requests: R.
        survival: [TENTHS] probability that a token of the chain holds, by the tenth of the probability that the model
            gives it.
        token_ms: milliseconds that a token is worth, as in `DraftLimits`.
        ends: [R, E] each request's end tokens, filled up with -1; None: there are none.
    """

    def __init__(
        self, num_requests: int, survival: npt.NDArray[np.float64], token_ms: float, ends: IntArray | None = None
    ) -> None:
        self._ends = ends if ends is not None else np.zeros((num_requests, 0), np.int32)
        # level -> [R] whether the chain above it holds no end token
        self._is_open: list[npt.NDArray[np.bool_]] = [np.ones(num_requests, np.bool_)]
        self._survival = survival
        self._token_ms = token_ms
        self._tokens: list[npt.NDArray[np.int64]] = []
        self._log_q: list[npt.NDArray[np.float32]] = []
        # [R] probability that the target follows the chain down to here
        self._reach = np.ones(num_requests)
        # tokens that one more level is expected to bring, all requests together
        self._next = float(num_requests)

    @property
    def depth(self) -> int:
        return len(self._tokens)

    def add(self, tokens: npt.NDArray[np.int64], log_q: npt.NDArray[np.float32]) -> None:
        """The next level.

        Args:
            tokens: [R, width] the chain's node, then its alternatives.
            log_q: [R, width] natural logarithms of their probabilities, given the noise (`Coupling`).
        """
        self._tokens.append(tokens)
        self._log_q.append(log_q)
        most = len(self._survival) - 1
        tenths = np.minimum((np.exp(log_q[:, 0]) * len(self._survival)).astype(np.int64), most)
        goes_on = (tokens[:, :1] != self._ends).all(axis=1)
        self._is_open.append(self._is_open[-1] & goes_on)
        before, self._reach = self._reach.sum(), self._reach * self._survival[tenths] * goes_on
        # the next level is expected to hold as often as this one did
        self._next = float(self._reach.sum() ** 2 / max(before, 1e-9))

    @property
    def may_end(self) -> bool:
        """Whether levels may end before the limit: what a token is worth is known."""
        return self._token_ms > 0.0

    def is_enough(self, pass_ms: float) -> bool:
        """Whether one more level is expected to cost more than its tokens are worth."""
        return self.may_end and self._next * self._token_ms < pass_ms

    def trees(self, batch: RequestBatch, limits: DraftLimits, index: npt.NDArray[np.int64], source: int) -> TreeBatch:
        """The trees, over the whole batch.

        Args:
            index: [R] the requests' places in the batch.
            source: of the chain's nodes; an alternative has the next one, since it holds less often.
        """
        tokens, log_q = np.stack(self._tokens, axis=1), np.stack(self._log_q, axis=1)
        depth, width = tokens.shape[1:]
        chains = limits.is_chain[index]
        # [R, depth, width] within the request's levels; a chain has none
        fits = np.broadcast_to((np.arange(depth) < limits.max_depth[index][:, None])[:, :, None], tokens.shape).copy()
        fits[chains, :, 1:] = False
        fits &= np.stack(self._is_open[:-1], axis=1)[:, :, None]
        counts = np.zeros(batch.size, dtype=np.int64)
        counts[index] = fits.sum(axis=(1, 2))
        # the nodes of a level hang on the chain's node of the level above
        step = np.where(chains, 1, width)[:, None]
        parents = np.where(np.arange(depth) == 0, ROOT, (np.arange(depth) - 1) * step)
        trees = proposed(
            batch.request_ids,
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            tokens[fits].astype(np.int32),
            np.broadcast_to(parents[:, :, None], tokens.shape)[fits].astype(np.int32),
            log_q[fits].astype(np.float32),
            source,
        )
        sources = np.broadcast_to(source + np.minimum(np.arange(width), 1), tokens.shape)[fits].astype(np.int32)
        columns = (trees.node_start, trees.token_ids, trees.parents, trees.log_q)
        return TreeBatch(batch.request_ids, *columns, sources, trees.depth)
