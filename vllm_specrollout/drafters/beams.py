"""Trees of a model that drafts: of each level some nodes go on, and the likeliest of all are drafted. Pure.

EAGLE-2 (Li et al., 2024, section 4), TLT (section 5.1) and FastGRPO (section 4.1) draft such trees: `beam` nodes of a
level are expanded, `children` of each are looked at, and the best of all that were looked at are verified. What makes
one better is the product of the probabilities down to it. A comb is a beam of one. `tests/reference/beams.py` is the
specification.
"""

from __future__ import annotations

import torch

NEVER = float("-inf")
WIDTHS = (1, 2, 4, 8)
"""Beams that there are."""
CHILDREN = 8
"""Nodes looked at below one that goes on."""
LEAST_NODES = 12
"""A tree of fewer nodes gains nothing by a beam: within 2 % of a comb of as many."""


class BeamTrees:
    """Trees of R requests.

    Args:
        ends: [R, E] int tokens that are not drafted; -1: none.
        are_chains: [R] bool requests of which the likeliest child goes on alone.
        beam: nodes of a level that go on, at most.
    """

    def __init__(self, ends: torch.Tensor, are_chains: torch.Tensor, beam: int) -> None:
        self.beam = beam
        self._ends, self._are_chains = ends, are_chains
        # per level: [R, W * C] tokens, places of their parents among all nodes looked at, and log probabilities of the
        # walks down to them, `NEVER` if they are not drafted
        self._levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._count = 0
        # [R, W] of the nodes that go on: places, and log probabilities
        self._going = torch.full((len(ends), 1), -1, dtype=torch.int64, device=ends.device)
        self._joint = torch.zeros(len(ends), 1, device=ends.device)

    @classmethod
    def of_comb(
        cls, ends: torch.Tensor, are_chains: torch.Tensor, tokens: torch.Tensor, log_p: torch.Tensor
    ) -> BeamTrees:
        """Trees whose likeliest token of each level went on, whatever it was: those of plain passes.

        Args:
            tokens, log_p: [R, L, C] of each level, as `add` takes them.
        """
        made = cls(ends, are_chains, 1)
        requests, levels, children = tokens.shape
        is_in = (tokens[..., None] != ends[:, None, None]).all(dim=-1)
        chain = torch.where(is_in[..., 0], log_p[..., 0], NEVER).cumsum(dim=1)
        above = torch.cat([torch.zeros_like(chain[:, :1]), chain[:, :-1]], dim=1)[..., None]
        is_first = torch.arange(children, device=tokens.device) == 0
        joint = torch.where(is_in & (is_first | ~are_chains[:, None, None]), above + log_p, NEVER)
        place = torch.arange(-1, levels - 1, device=tokens.device) * children
        parents = place.clamp(min=-1)[:, None].expand(requests, levels, children)
        made._levels.append((tokens.flatten(1), parents.flatten(1), joint.flatten(1)))
        return made

    def add(self, tokens: torch.Tensor, log_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next level: children of the W nodes that go on, the root at first.

        Args:
            tokens: [R, W, C] the likeliest ones of each node, in that order.
            log_p: [R, W, C] their log probabilities.

        Returns:
            [R, W'] int64 which of the W nodes each of those is a child of that go on from here, and its token. Where
            fewer can go on than there are, the last ones are of no use.
        """
        requests, width, children = tokens.shape
        is_in = (tokens[..., None] != self._ends[:, None, None]).all(dim=-1)
        is_first = torch.arange(children, device=tokens.device) == 0
        is_in &= is_first | ~self._are_chains[:, None, None]
        joint = torch.where(is_in, self._joint[..., None] + log_p, NEVER).flatten(1)
        above = self._going[..., None].expand(-1, -1, children).flatten(1)
        self._levels.append((tokens.flatten(1), above, joint))
        # the first of equals
        order = joint.sort(dim=1, descending=True, stable=True).indices[:, : self.beam]
        self._joint = joint.gather(1, order)
        self._going = order + self._count
        self._count += joint.shape[1]
        return order // children, tokens.flatten(1).gather(1, order)

    def best(self, limits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The likeliest nodes, as a lookup returns them: [R, width] int32 tokens, -1 behind the last one; int32
        parents, -1 for the root; and float32 the probability that the target walks down to each.

        Args:
            limits: [R] int most nodes.
        """
        tokens, above, joint = (torch.cat(column, dim=1) for column in zip(*self._levels, strict=True))
        # a node is no likelier than those above it, and stands behind them: so they come with it
        order = joint.sort(dim=1, descending=True, stable=True).indices[:, :width]
        place = torch.full_like(tokens, -1).scatter_(
            1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        )
        known, parent = joint.gather(1, order), above.gather(1, order)
        is_in = (known > NEVER) & (torch.arange(order.shape[1], device=order.device) < limits[:, None])
        parent = torch.where(parent >= 0, place.gather(1, parent.clamp(min=0)), -1)
        found = torch.full((2, len(tokens), width), -1, dtype=torch.int32, device=tokens.device)
        found[0, :, : order.shape[1]] = torch.where(is_in, tokens.gather(1, order), -1)
        found[1, :, : order.shape[1]] = torch.where(is_in, parent, -1)
        paths = torch.zeros(len(tokens), width, device=tokens.device)
        paths[:, : order.shape[1]] = torch.where(is_in, known.exp(), 0.0)
        return found[0], found[1], paths


def widest(most: int) -> int:
    """The widest beam of at most so many nodes."""
    return max(one for one in WIDTHS if one <= max(most, 1))


def beam_for(nodes: int, requests: int, most_rows: int, pass_ms: float = 0.0, row_ms: float = 0.0) -> int:
    """How many nodes of a level go on, of trees of so many nodes.

    Of trees of the shipped head two nodes bring nearly all that more do up to 16 nodes, four up to 32. A row more costs
    little beside its pass, until the passes' rows are no longer free.

    Args:
        nodes: of a request, at most.
        requests: drafted for together.
        most_rows: of a pass.
        pass_ms, row_ms: milliseconds of a pass, and of one more of its rows; 0: not known.
    """
    if nodes < LEAST_NODES:
        return 1
    wanted = 2 if nodes <= 16 else 4 if nodes <= 32 else 8
    # a level's other nodes are worth a tenth of its first one: rows that cost more than that are not free
    dear = [one for one in WIDTHS if one * requests <= most_rows and (one - 1) * requests * row_ms <= 0.1 * pass_ms]
    return min(wanted, max(dear, default=1))
