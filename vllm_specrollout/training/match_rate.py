"""The probability that a draft is met under shared noise, from two distributions, without drawing any noise.

The target chooses argmax(log p + g), a draft is argmax(log q + g), with the same Gumbel noise g. Both choose token i
with probability 1 / sum_j max(p_j / p_i, q_j / q_i). Sorted by q / p, that sum falls into two cumulative ones, so all
tokens together take V log V operations. It is what a head is logged, judged and chosen by. Agreement of the likeliest
tokens says far less where the target has entropy, and 1 - TV is what rejection sampling would accept, which is more.
"""

from __future__ import annotations

import torch

_LEAST = 1e-30
"""In place of a probability of 0, whose ratios are no numbers."""


def match_rate(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[...] the probability that target and draft are the same token.

    Args:
        p, q: [..., V] probabilities of the target and of the draft.
    """
    p, q = p.clamp_min(_LEAST), q.clamp_min(_LEAST)
    order = (q / p).argsort(dim=-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    # where q / p is at most a token's own, p decides; beyond, q does
    below = p.cumsum(dim=-1)
    beyond = q.flip(-1).cumsum(dim=-1).flip(-1) - q
    return (1.0 / (below / p + beyond / q)).sum(dim=-1)


def match_rate_of(p: torch.Tensor, q: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """[...] the same, once it is known which token the target chose: so chains of matches along an answer multiply.

    Args:
        p, q: [..., V] probabilities.
        token: [...] int64, the target's.
    """
    p, q = p.clamp_min(_LEAST), q.clamp_min(_LEAST)
    own_p, own_q = (one.gather(-1, token[..., None]) for one in (p, q))
    return 1.0 / torch.maximum(p, q * (own_p / own_q)).sum(dim=-1)
