"""A stream: what a drafter has drafted for one request, ahead of the target. Pure.

What belongs here: the request's tokens, the tree drafted behind them, which of its leaves are looked behind next, and
what a verdict leaves of it. The engine around it computes tokens (worker/streams).

The tree hangs below the last token that holds. Its first choices are the stream; the choices beside them are exits,
where the target may leave it, and they are continued as well where that is likely. A window has w tokens, and the tree
is at most two windows deep: one that the verifier looks at, and one more. So a miss costs at most 2w - 1 tokens of the
stream behind it (SpecActor 4.1). A coupled stream waits at the end of each window for its verdict: it is at most one
window deep, and a miss costs at most w - 1. What was drafted before a stream was coupled stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specrollout.cluster.messages import Drafts, Noise, Open, Pace, Verdict
from vllm_specrollout.types import MOST_NODES, ROOT, TENTHS

_MOST_KEPT = 1024
"""Nodes kept of one stream; those that are hardly ever reached go first."""
_PRIOR = 4.0
"""Observations that the drafter's own probability counts for."""


class Survival:
    """How often a drafter's choices hold, learned by rank (the first, any other) and the tenth of its probability."""

    def __init__(self) -> None:
        # [2][TENTHS] how often such choices were looked at, and held
        self._looked = [[0.0] * TENTHS, [0.0] * TENTHS]
        self._held = [[0.0] * TENTHS, [0.0] * TENTHS]

    def observe(self, rank: int, log_q: float, holds: bool) -> None:
        kind, tenth = _cell(rank, log_q)
        self._looked[kind][tenth] += 1.0
        self._held[kind][tenth] += holds

    def log(self, rank: int, log_q: float) -> float:
        """Natural logarithm of the probability that the choice holds where its parent does."""
        kind, tenth = _cell(rank, log_q)
        own = math.exp(log_q)
        rate = (self._held[kind][tenth] + _PRIOR * own) / (self._looked[kind][tenth] + _PRIOR)
        return math.log(min(max(rate, 1e-9), 1.0))


def _cell(rank: int, log_q: float) -> tuple[int, int]:
    return min(rank, 1), min(int(math.exp(log_q) * TENTHS), TENTHS - 1)


@dataclass(frozen=True, slots=True)
class Choices:
    """What the drafter would have behind one token."""

    # [width] tokens, best first
    token_ids: Sequence[int]
    # [width] natural logarithms of their probabilities
    log_q: Sequence[float]
    # [1 + 2 * CHOICES] the best, what each candidate for the sharpness would have, and beside it; None: not tried
    trial: npt.NDArray[np.int64] | None = None


@dataclass(slots=True)
class _Node:
    """One drafted token."""

    token: int
    parent: _Node | None
    log_q: float
    # 0: the first choice behind its parent
    rank: int
    depth: int
    # natural logarithm of the probability that the target comes here
    log_reach: float
    # None: nobody looked behind it yet
    children: list[_Node] | None = None
    trial: npt.NDArray[np.int64] | None = None

    @property
    def is_stream(self) -> bool:
        """Whether the stream itself goes through here."""
        return self.rank == 0 and (self.parent is None or self.parent.is_stream)


@dataclass(frozen=True, slots=True)
class Look:
    """Rows of a drafter's pass for one stream: the last token that holds, then nodes, parents first."""

    # [nodes] tokens, and index of each one's parent among the nodes; ROOT: the last token that holds
    token_ids: list[int]
    parents: list[int]
    # [1 + nodes] levels below the last token that holds
    depths: list[int]


class Stream:
    """One request's draft tree.

    Args:
        opened: what the verifier said of it.
        most_tokens: that the engine can hold, prompt included.
        most_nodes: nodes that are looked behind, at most.
        survival: how often choices hold; all streams share it, and teach it.
        noise: what the verifier's seeds are.
    """

    def __init__(
        self, opened: Open, most_tokens: int, most_nodes: int, survival: Survival, noise: Noise = Noise.TAPE
    ) -> None:
        self.opened = opened
        # those that hold
        self.tokens: list[int] = opened.token_ids.tolist()
        self.window, self.fan_out, self.pace = opened.window, opened.fan_out, opened.pace
        self.generation = 0
        """How often the target left the stream."""
        self.wasted = self.drafted = 0
        """Tokens of the stream: behind misses, and in all."""
        # [1 + 2 * CHOICES] each: which tokens of the trials were the target's
        self.met: list[npt.NDArray[np.bool_]] = []
        self._most_tokens = min(most_tokens, len(self.tokens) + opened.max_tokens)
        self._most_nodes = min(most_nodes, MOST_NODES)
        self._survival = survival
        self._is_counted = noise is Noise.COUNTER
        self._seeds, self._first_seed = opened.seeds, len(self.tokens)
        self._root = _Node(self.tokens[-1], None, 0.0, 0, 0, 0.0)
        # tokens of the request where the window without a verdict ends
        self._end = len(self.tokens) + self.window
        # of the pass in progress: the root, then the nodes looked at
        self._looked: list[_Node] = []
        self._is_due = False

    @property
    def is_greedy(self) -> bool:
        return self.opened.temperature == 0.0

    @property
    def depth(self) -> int:
        """Levels of the stream."""
        node, depth = self._root, 0
        while node.children:
            node, depth = node.children[0], depth + 1
        return depth

    @property
    def most_levels(self) -> int:
        """Below the last token that holds, that may be drafted now."""
        return 2 * self.window if self.pace is Pace.DECOUPLED else self._end - len(self.tokens)

    @property
    def may_draft(self) -> bool:
        """Whether there is anything to look behind."""
        return bool(self._frontier())

    def seed(self, depth: int) -> int | None:
        """The noise of the choices behind a node of this depth, or what it is counted from; None: the best token is
        taken."""
        if self.is_greedy:
            return None
        at = 0 if self._is_counted else len(self.tokens) + depth - self._first_seed
        # a verifier that names no noise for it gets poor drafts, no more
        return int(self._seeds[at]) if 0 <= at < len(self._seeds) else 0

    def place(self, depth: int) -> int:
        """Of a node of this depth, counted from 0 over the request's tokens. vLLM counts a token's noise by the place
        of the token before it: so this is what the choices behind the node are drawn by."""
        return len(self.tokens) - 1 + depth

    def look(self) -> Look:
        """What the next pass computes: leaves, and all that stands above them."""
        wanted: set[int] = set()
        for leaf in self._frontier():
            node: _Node | None = leaf
            while node is not None and id(node) not in wanted:
                wanted.add(id(node))
                node = node.parent
        nodes = [node for node in self._nodes() if id(node) in wanted]
        nodes.sort(key=lambda node: -node.log_reach)  # a child comes after its parent: it is no likelier, and the
        # sort keeps the order of equals; so a pass that has room for some has room for the best
        self._looked = [self._root, *nodes]
        place = {id(node): i - 1 for i, node in enumerate(self._looked)}
        parents = [place[id(node.parent)] for node in nodes]
        return Look([node.token for node in nodes], parents, [node.depth for node in self._looked])

    def grow(self, choices: Sequence[Choices]) -> None:
        """The pass is over.

        Args:
            choices: [1 + nodes] behind each of its rows; fewer, where there was no room for the last ones.
        """
        before = self.depth
        for node, own in zip(self._looked, choices, strict=False):
            if node.children is None:
                node.children, node.trial = self._children(node, own), own.trial
                self.drafted += node.is_stream
                self._is_due = True
        self._looked = []
        assert self.depth <= max(self.most_levels, before), "a stream ran further ahead than it may"

    def take(self, verdict: Verdict) -> list[int]:
        """What holds now; returns the tokens that are new."""
        self._seeds, self._first_seed = verdict.seeds, verdict.first_seed
        begin, before = verdict.num_tokens - len(verdict.token_ids), len(self.tokens)
        if verdict.num_tokens <= before or begin > before:
            return []  # nothing new; or verdicts between are lost, and the verifier will open it anew
        self.window, self.fan_out, self.pace = verdict.window, verdict.fan_out, verdict.pace
        misses, known = self.generation, verdict.token_ids.tolist()[before - begin :]
        self.tokens += known
        node: _Node | None = self._root
        for token in known:
            node = self._go(node, token) if node is not None else None
        if node is None:
            node = _Node(known[-1], None, 0.0, 0, 0, 0.0)
        self._plant(node)
        furthest = len(self.tokens) + self.window
        is_answered = self.generation > misses or not self._root.children or len(self.tokens) >= self._end
        self._end = furthest if is_answered else min(self._end, furthest)
        self._is_due = bool(self._root.children)
        return known

    def due(self) -> Drafts | None:
        """The tree, if the verifier does not know it yet."""
        if not self._is_due:
            return None
        self._is_due = False
        nodes = sorted(self._nodes(), key=lambda node: -node.log_reach)[:MOST_NODES]
        place = {id(self._root): ROOT} | {id(node): i for i, node in enumerate(nodes)}
        return Drafts(
            self.opened.handle,
            self.generation,
            len(self.tokens),
            np.asarray([node.token for node in nodes], dtype=np.int32),
            np.asarray([place[id(node.parent)] for node in nodes], dtype=np.int32),
            np.asarray([node.log_q for node in nodes], dtype=np.float32),
        )

    # --- the tree ----------------------------------------------------------------------------------------------------

    def _nodes(self) -> list[_Node]:
        """All but the root, parents first."""
        found: list[_Node] = list(self._root.children or ())
        for node in found:
            found.extend(node.children or ())
        return found

    def _frontier(self) -> list[_Node]:
        """Leaves worth looking behind: among the nodes that the target reaches most often."""
        if self._root.children is None:
            return [self._root] if self._may_be_deeper(0) else []
        nodes = sorted(self._nodes(), key=lambda node: -node.log_reach)[: self._most_nodes]
        return [node for node in nodes if node.children is None and self._may_be_deeper(node.depth)]

    def _may_be_deeper(self, depth: int) -> bool:
        at = len(self.tokens) + depth
        seed = 0 if self._is_counted else at - self._first_seed
        has_noise = self.is_greedy or 0 <= seed < len(self._seeds)
        return depth < self.most_levels and at < self._most_tokens and has_noise

    def _children(self, node: _Node, own: Choices) -> list[_Node]:
        pairs = zip(own.token_ids[: self.fan_out], own.log_q[: self.fan_out], strict=True)
        return [
            _Node(token, node, q, rank, node.depth + 1, node.log_reach + self._survival.log(rank, q))
            for rank, (token, q) in enumerate(pairs)
            if math.isfinite(q)
        ]

    def _go(self, node: _Node, token: int) -> _Node | None:
        """Where the target went; None: not where anything was drafted."""
        if node.children is None:
            return None
        if node.trial is not None:
            self.met.append(node.trial == token)
        for child in node.children:
            self._survival.observe(child.rank, child.log_q, child.token == token)
        found = next((child for child in node.children if child.token == token), None)
        if node.is_stream and (found is None or found.rank > 0):
            self.generation += 1
            # the token that the target replaced is no waste: it was looked at
            self.wasted += max(self._stream_below(node) - 1, 0)
        return found

    @staticmethod
    def _stream_below(node: _Node) -> int:
        count = 0
        while node.children:
            node, count = node.children[0], count + 1
        return count

    def _plant(self, root: _Node) -> None:
        """The tree hangs below this node from now on."""
        up, reach = root.depth, root.log_reach
        root.parent, root.rank, self._root = None, 0, root
        nodes = [root, *self._nodes()]
        for node in nodes:
            node.depth, node.log_reach = node.depth - up, node.log_reach - reach
        if len(nodes) > _MOST_KEPT:
            kept = {id(node) for node in sorted(nodes, key=lambda node: -node.log_reach)[:_MOST_KEPT]}
            for node in nodes:
                if node.children is not None:
                    node.children = [child for child in node.children if id(child) in kept]
