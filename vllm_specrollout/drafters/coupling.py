"""The coupling of a model that drafts: how likely each of its tokens is, given the noise of their position. Pure.

The target takes argmax(log p + g), and the model knows q and g. So a token's probability is softmax(a log q + b g):
a says how much the model's log probabilities count, b the noise. A copy of the target has large ones and a = b; a model
that knows little has b near 0; greedy requests have no noise, and an a of their own. The likeliest token is what is
drafted, and its probability is what budgets count with.

Both are learned by maximum likelihood from the tokens that the target took: one Newton step for each batch of them,
over sums in which older ones fade (recursive likelihood, as in Ljung and Soederstroem, "Theory and practice of
recursive identification", 1983, section 3.6). Nothing waits for the host: a device's are learned there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LIKELIEST = 512
"""Tokens of a row that are told apart; the others count as one, which has no noise and is never drafted."""
WORST = -20.0
"""Log probability at which a token counts as one that cannot come, and of what is no number: one surprise more or less
must not decide."""
FIRST = (1.0, 0.4)
"""Weights before anything is known."""
MOST = 32.0
"""Either weight, at most: from there on the likeliest token has all of the probability."""
MEMORY = 0.9995
"""Weight left to an observation after each further one."""
FADED = 0.1
"""Weight left to what was learned of a model whose weights are replaced."""
_LEAST, _STEP = 0.05, 0.25
# what is believed of FIRST: so many squares of log probabilities, or of noise, as observations bring one each
_PRIOR = 20.0
_GREEDY, _SAMPLED = 0, 1


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The likeliest tokens of R rows: M of each, in the order of their probability."""

    # [R, M] int64
    tokens: torch.Tensor
    # [R, M + 1] float32 log q at the request's temperature; the last one of all other tokens together
    log_q: torch.Tensor
    # [R, M + 1] float32 noise that the target's token is chosen with; 0 of the others, and where there is none
    noise: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, most: int = LIKELIEST) -> Likeliest:
        """Those of logits [R, vocab], finite or -inf, at the requests' temperatures; without noise."""
        logits = logits.float()
        highest, tokens = logits.topk(min(most, logits.shape[1]), dim=-1)
        log_q = highest - logits.logsumexp(dim=-1, keepdim=True)
        others = torch.log1p(-log_q.exp().sum(dim=-1, keepdim=True).clamp(max=1.0))
        if most >= logits.shape[1]:
            # what is left of the sum is rounding
            others = torch.full_like(others, WORST)
        log_q = torch.nan_to_num(torch.cat([log_q, others], dim=-1), nan=WORST, neginf=WORST).clamp(min=WORST)
        return cls(tokens, log_q, torch.zeros_like(log_q))


class Coupling:
    """The weights of one model that drafts.

    Args:
        device: where they lie, and are learned.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        greedy, sampled = (FIRST[0], 0.0), FIRST
        # [2, 2] float32 of greedy requests and of others: a and b
        self._weights = torch.tensor([greedy, sampled], dtype=torch.float32, device=device)
        # [2, 2, 2] float64 of both, the likelihood's curvature: what was observed, faded
        self._curvature = (_PRIOR * torch.eye(2, dtype=torch.float64)).repeat(2, 1, 1).to(device)
        self._least = torch.tensor([_LEAST, 0.0], device=device)
        self._floor = 0.05 * self._curvature[0]
        self._pinned: torch.Tensor | None = None

    def log_probabilities(self, rows: Likeliest, is_greedy: torch.Tensor) -> torch.Tensor:
        """[R, M + 1] float32 of the rows' tokens, and of all others together.

        Args:
            is_greedy: [R] bool.
        """
        weights = self._weights if self._pinned is None else self._pinned
        a, b = weights[1 - is_greedy.long()].unbind(dim=-1)
        return (a[:, None] * rows.log_q + b[:, None] * rows.noise).log_softmax(dim=-1)

    def observe(
        self, rows: Likeliest, is_greedy: torch.Tensor, taken: torch.Tensor, counts: torch.Tensor | None = None
    ) -> None:
        """The target took tokens.

        Args:
            is_greedy: [R] bool.
            taken: [R] int64 the token that the target took in the place of each row.
            counts: [R] bool whether the row counts; None: all do.
        """
        if self._pinned is not None or not len(taken):
            return
        probabilities = self.log_probabilities(rows, is_greedy).double().exp()
        features = torch.stack([rows.log_q, rows.noise], dim=-1).double()
        is_taken = rows.tokens == taken[:, None]
        # the others, if it is none of these
        place = torch.where(is_taken.any(dim=-1), is_taken.byte().argmax(dim=-1), is_taken.shape[-1])
        mean = (probabilities[..., None] * features).sum(dim=1)
        at = torch.gather(features, 1, place[:, None, None].expand(-1, -1, 2))[:, 0]
        away = features - mean[:, None]
        curvature = torch.einsum("rm,rmi,rmj->rij", probabilities, away, away)
        good = torch.isfinite(at).all(dim=-1) & torch.isfinite(curvature).flatten(1).all(dim=-1)
        if counts is not None:
            good &= counts
        for kind in (_GREEDY, _SAMPLED):
            own = good & (is_greedy if kind == _GREEDY else ~is_greedy)
            self._step(kind, own, at - mean, curvature)

    def _step(self, kind: int, own: torch.Tensor, slope: torch.Tensor, curvature: torch.Tensor) -> None:
        """One Newton step of one kind of requests.

        Args:
            own: [R] bool its rows.
            slope, curvature: [R, 2] and [R, 2, 2] of the rows' log likelihood.
        """
        count = own.sum()
        slope = torch.where(own[:, None], slope, 0.0).sum(dim=0)
        observed = torch.where(own[:, None, None], curvature, 0.0).sum(dim=0)
        self._curvature[kind] = self._curvature[kind] * MEMORY**count + observed
        # what is believed never fades altogether: rows of which nothing can be learned leave the rest as it is
        (a, both), (_, b) = self._curvature[kind] + self._floor
        inverse = torch.stack([b, -both, -both, a]).view(2, 2) / (a * b - both * both)
        now = self._weights[kind]
        most = _STEP * now.max()
        moved = (now + (inverse @ slope).float().clamp(-most, most)).clamp(max=MOST)
        moved = torch.maximum(torch.where(torch.isfinite(moved), moved, now), self._least)
        self._weights[kind] = torch.where(count > 0, moved, now)
        if kind == _GREEDY:
            self._weights[kind, 1] = 0.0

    def fade(self) -> None:
        """The model has other weights: it begins with what was learned of the old ones, and learns fast."""
        self._curvature *= FADED

    @property
    def sampled(self) -> tuple[float, float]:
        """a and b of requests that are not greedy; waits for the device."""
        a, b = self._weights[_SAMPLED].tolist()
        return a, b

    def pin(self, a: float, b: float) -> None:
        """Draft with these weights until they are unpinned, for benchmarks and tests; what is learned stays."""
        self._pinned = torch.tensor([[a, 0.0], [a, b]], device=self._weights.device)

    def unpin(self) -> None:
        """Draft with what was learned."""
        self._pinned = None
