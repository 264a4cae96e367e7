"""Trees of one request that came from a drafter elsewhere, one Python object each: what `_core.Received` must do."""

from __future__ import annotations

from dataclasses import dataclass

NONE = 8


@dataclass
class Naive:
    """The newest tree of one request."""

    # tokens that stand before depth 1
    position: int = 0
    # of each node: token, parent, rank, log probability
    nodes: tuple[tuple[int, int, int, float], ...] = ()
    # tokens whose ranks are known, or never will be
    ranked: int = 0
    ranks: tuple[int, ...] = ()

    def fit(self, text: list[int], most: int, depth: int, is_chain: bool) -> list[tuple[int, int, float, int]]:
        """Of each node that may be verified next: token, parent, log probability, whether it is a first choice."""
        if not self.nodes or self.position > len(text):
            return []
        at = -1
        for position in range(self.position, len(text)):
            choices = [i for i, node in enumerate(self.nodes) if node[1] == at]
            hits = [i for i in choices if self.nodes[i][0] == text[position] and self.nodes[i][2] < NONE]
            hit = min(hits, key=lambda i: self.nodes[i][2], default=None)
            if choices and position >= self.ranked:
                self.ranks += (NONE if hit is None else self.nodes[hit][2],)
                self.ranked = position + 1
            if hit is None:
                self.nodes = ()
                return []
            at = hit
        levels, kept, with_child = {at: 0}, {}, set()
        found: list[tuple[int, int, float, int]] = []
        for i, (token, parent, rank, log_q) in enumerate(self.nodes):
            if i <= at or parent not in levels or levels[parent] == depth or len(found) == most:
                continue
            if is_chain and parent in with_child:
                continue
            with_child.add(parent)
            levels[i], kept[i] = levels[parent] + 1, len(found)
            found.append((token, kept.get(parent, -1), log_q, int(rank == 0)))
        return found
