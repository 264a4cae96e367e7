"""A line: what a drafter has drafted for one request, ahead of the target. Pure.

What belongs here: the request's tokens, the tree drafted behind them, which requests of the drafter's own engine draft
it, and what a verdict leaves of it. The engine itself is in worker/drafter_engine.py.

A draft is a *resumed request*: it has the target's seed, and as its prompt the tokens that hold, so it draws with the
target's own noise. It runs ahead, one token a pass. What it draws is the stream; the likeliest tokens beside each are
exits, where the target may leave it, and an exit that is likely enough is drafted behind by a request of its own: a
branch. Where the target goes elsewhere, the requests behind it are aborted, and others begin where it went.

A window has w tokens, and the tree is at most two windows deep: one that the verifier looks at, and one more. So a miss
costs at most 2w - 1 tokens of the stream behind it (SpecActor 4.1). What was drafted before stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_specrollout.cluster.messages import Sampling
from vllm_specrollout.types import MOST_NODES, ROOT, TENTHS, FloatArray, IntArray

LEAST_REACH = 0.05
"""Probability that the target comes to an exit, below which nobody drafts behind it."""
ROWS = 32
"""Requests of the drafter in a pass that cost little more than one. Shared out over the target's, each has 1 to
`MOST_BRANCHES`: measured, four of them at batch 4 and 8 bring more tokens, at batch 32 fewer."""
MOST_BRANCHES = 4
_MOST_KEPT = 1024  # nodes of one line
_PRIOR = 4.0  # observations that the drafter's own probability counts for


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
        rate = (self._held[kind][tenth] + _PRIOR * math.exp(log_q)) / (self._looked[kind][tenth] + _PRIOR)
        return math.log(min(max(rate, 1e-9), 1.0))


def _cell(rank: int, log_q: float) -> tuple[int, int]:
    return min(rank, 1), min(int(math.exp(log_q) * TENTHS), TENTHS - 1)


class NoiseTrial:
    """Whether the target's noise meets its tokens more often than the drafter's best ones do.

    It does where the drafter is much like the target; where it is not, its best token is met as often or more. Both are
    compared at positions that were drawn with the noise, where both are known; so a share of the lines is drawn with it
    even where the best tokens win.
    """

    SHARE = 8
    """Of so many requests one is drawn with the noise, whoever wins."""
    _MEMORY = 0.999

    def __init__(self) -> None:
        self._asked = 0
        # of the last thousand positions or so that were drawn with the noise
        self._drawn = self._best = 0.0

    @property
    def is_better(self) -> bool:
        return self._drawn >= self._best

    def draw(self) -> bool:
        """Whether the next request is drawn with the noise."""
        self._asked += 1
        return self.is_better or self._asked % self.SHARE == 0

    def observe(self, is_drawn: bool, is_best: bool) -> None:
        """Whether the target's token was the one drawn, and the drafter's best."""
        self._drawn = self._MEMORY * self._drawn + is_drawn
        self._best = self._MEMORY * self._best + is_best


@dataclass(slots=True, eq=False)
class Node:
    """One drafted token."""

    token: int
    parent: Node | None
    # tokens of the request up to here
    place: int
    # 0: the first choice behind its parent
    rank: int = 0
    log_q: float = 0.0
    # natural logarithm of the probability that the target comes here from the root that it was drafted behind
    log_reach: float = 0.0
    # empty: nobody drafted behind it
    children: list[Node] = field(default_factory=list)
    # the drafter's best token behind it; None: its children were not drawn with the noise
    best: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that the drafter's engine is to be asked for."""

    name: str
    # prompt, answer so far and drafts, and how many of them are the prompt
    token_ids: list[int]
    prompt_tokens: int
    max_tokens: int
    # drawn with the target's noise, not the best ones
    is_drawn: bool


@dataclass(frozen=True, slots=True)
class Tree:
    """A line's tree, as messages have it."""

    # tokens that stand before depth 1
    position: int
    # [nodes]
    token_ids: IntArray
    parents: IntArray
    ranks: IntArray
    log_q: FloatArray


class Line:
    """One request's draft tree, and the requests that draft it.

    Args:
        name: what the requests' names begin with.
        token_ids: the request's tokens so far, of which the first `prompt_tokens` are the prompt.
        max_tokens: that it may still get.
        most_tokens: that the drafter's engine holds of one request, at most.
        survival, noise: learned; all lines share them, and teach them.
    """

    def __init__(
        self,
        name: str,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        prompt_tokens: int,
        max_tokens: int,
        most_tokens: int,
        window: int,
        survival: Survival,
        noise: NoiseTrial,
    ) -> None:
        self.tokens = list(token_ids)
        self.sampling, self.window = sampling, window
        self._prompt_tokens = prompt_tokens
        self.drafted = self.wasted = self.misses = 0
        """Tokens of the stream: in all, and behind misses; and how often the target left it."""
        self.tips: dict[str, Node] = {}
        """Running requests of the drafter -> the node behind which each one's next token goes."""
        self._name, self._count = name, 0
        self._survival, self._noise = survival, noise
        self._most_tokens = min(most_tokens, len(self.tokens) + max_tokens)
        self._root = Node(self.tokens[-1], None, len(self.tokens))
        self._nodes = 1
        self._is_due = False
        # requests -> whether they draw with the noise
        self._draws: dict[str, bool] = {}

    @property
    def most_levels(self) -> int:
        """Below the last token that holds, that may be drafted now."""
        return 2 * self.window

    @property
    def depth(self) -> int:
        """Levels of the stream."""
        return _stream_below(self._root)

    def wanted(self, branches: int) -> list[Ask]:
        """Requests to begin with: at most so many run for this line, behind the likeliest leaves."""
        found = []
        for node in self._leaves():
            if len(self.tips) >= branches:
                break
            name, self._count = f"{self._name}-{self._count}", self._count + 1
            self.tips[name] = node
            is_drawn = self._draws[name] = self.sampling.has_noise and self._noise.draw()
            room = min(
                self.most_levels - (node.place - self._root.place) + 2 * self.window, self._most_tokens - node.place
            )
            found.append(Ask(name, self._path(node), self._prompt_tokens, room, is_drawn))
        return found

    def grow(self, name: str, token_ids: Sequence[int], log_q: Sequence[float], best: int) -> bool:
        """A request has drawn its next token; whether it may go on.

        Args:
            token_ids, log_q: [width] the token, those that it is to be sent with, and their log probabilities.
            best: the likeliest token of all.
        """
        tip = self.tips[name]
        tip.best = best if self._draws[name] else None
        tip.children = [
            Node(token, tip, tip.place + 1, rank, q, tip.log_reach + self._survival.log(rank, q))
            for rank, (token, q) in enumerate(zip(token_ids, log_q, strict=True))
            if math.isfinite(q)
        ]
        self._is_due = True
        if not tip.children:
            return False
        self._nodes += len(tip.children)
        self.drafted += tip is self._root or _is_stream(tip)
        self.tips[name] = tip.children[0]
        return self._has_room(tip.children[0])

    def end(self, name: str) -> None:
        """The request is over, or aborted."""
        self.tips.pop(name, None)
        self._draws.pop(name, None)

    def take(self, token_ids: Sequence[int], window: int) -> list[str]:
        """A verdict: these hold as well.

        Returns:
            Requests to abort: they draft where the target did not go, or too far ahead.
        """
        node: Node | None = self._root
        for token in token_ids:
            node = self._go(node, token) if node is not None else None
        self.tokens += token_ids
        self._root = node if node is not None else Node(self.tokens[-1], None, len(self.tokens))
        self._root.parent, self._root.rank = None, 0
        live = {id(one) for one in self._all()}
        self._nodes = len(live)
        self.window = window
        self._is_due = bool(self._root.children)
        return [name for name, tip in self.tips.items() if id(tip) not in live or not self._has_room(tip)]

    def due(self) -> Tree | None:
        """The tree, if the verifier does not know it yet: what the target comes to most often."""
        if not self._is_due:
            return None
        self._is_due = False
        nodes = sorted(self._all()[1:], key=lambda node: -node.log_reach)[:MOST_NODES]
        place = {id(self._root): ROOT} | {id(node): i for i, node in enumerate(nodes)}
        return Tree(
            len(self.tokens),
            np.array([node.token for node in nodes], np.int32),
            np.array([place[id(node.parent)] for node in nodes], np.int32),
            np.array([node.rank for node in nodes], np.int32),
            np.array([min(node.log_q, 0.0) for node in nodes], np.float32),
        )

    # --- the tree ----------------------------------------------------------------------------------------------------

    def _all(self) -> list[Node]:
        """The root, then all below it, parents first."""
        found = [self._root]
        for node in found:
            found.extend(node.children)
        return found

    def _leaves(self) -> Iterator[Node]:
        """Behind which nobody drafts, and somebody may; the likeliest first."""
        if self._nodes > _MOST_KEPT:
            return
        taken, least = {id(tip) for tip in self.tips.values()}, self._root.log_reach + math.log(LEAST_REACH)
        nodes = [node for node in self._all() if not node.children and id(node) not in taken]
        for node in sorted(nodes, key=lambda node: -node.log_reach):
            if (node.log_reach >= least or _is_stream(node)) and self._has_room(node):
                yield node

    def _has_room(self, node: Node) -> bool:
        return node.place - self._root.place < self.most_levels and node.place < self._most_tokens

    def _path(self, node: Node) -> list[int]:
        """The request's tokens up to a node."""
        below: list[int] = []
        while node is not self._root:
            below.append(node.token)
            assert node.parent is not None
            node = node.parent
        return [*self.tokens, *reversed(below)]

    def _go(self, node: Node, token: int) -> Node | None:
        """Where the target went; None: not where anything was drafted."""
        if not node.children:
            return None
        if node.best is not None:
            self._noise.observe(node.children[0].token == token, node.best == token)
        for child in node.children:
            self._survival.observe(child.rank, child.log_q, child.token == token)
        found = next((child for child in node.children if child.token == token), None)
        if found is not node.children[0] and _is_stream(node):
            self.misses += 1
            # the token that the target replaced is no waste: it was looked at
            self.wasted += max(_stream_below(node) - 1, 0)
        return found


def branches(lines: int) -> int:
    """Requests of the drafter that each of so many requests may have."""
    return max(1, min(MOST_BRANCHES, ROWS // max(lines, 1)))


def _is_stream(node: Node) -> bool:
    """Whether the stream itself goes through here, or is at the root."""
    while node.parent is not None:
        if node.rank:
            return False
        node = node.parent
    return True


def _stream_below(node: Node) -> int:
    count = 0
    while node.children:
        node, count = node.children[0], count + 1
    return count
