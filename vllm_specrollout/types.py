"""Carriers between the parts: frozen dataclasses over numpy arrays, and nothing else.

request -> drafters -> draft trees -> verify -> commit -> observe -> budget. A carrier belongs here when two layers
exchange it; what only one layer knows stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

ROOT = -1
"""Parent of the nodes of depth 1. The root itself is the request's last known token; it is not a node."""


class DraftMode(Enum):
    """What may be drafted for a request."""

    TREE = "tree"
    CHAIN = "chain"
    OFF = "off"


class FinishReason(Enum):
    """How an answer ended."""

    FINISHED = "finished"  # by its own end or a stop string
    TRUNCATED = "truncated"  # by a length limit
    ABORTED = "aborted"  # by its client, or with the engine


@dataclass(slots=True)
class RequestView:
    """One running request, as it stands when its next draft is made.

    Made at its admission and kept to its end. The worker alone writes to it, between steps; nobody else ever does.
    """

    request_id: str
    # [num_tokens] int32: prompt and output so far; a view into the runner's buffer, valid during the call only
    token_ids: IntArray
    num_prompt_tokens: int
    # tokens the request may still generate (max_tokens and the model's length); a draft deeper than that is waste
    max_new_tokens: int
    shape: DraftMode = DraftMode.TREE
    max_draft_tokens: int = 1 << 30  # per step: the request's own limit
    problem_id: str = ""
    weights_version: int = 0
    name: str = ""  # that its client knows it by
    continues: bool = False  # from an earlier request's answer: its problem has not come back with it
    # [E] int32, ascending: the tokens that end its answer. Each comes out of the row before it, so none is drafted
    ends: IntArray = field(default_factory=lambda: _NO_INTS)


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that is over, with all that it generated; and what a history keeps of one."""

    request_id: str
    problem_id: str
    # [num_prompt_tokens] int32; in a history the last ones: contexts of the answer's first tokens reach into them
    prompt_ids: IntArray
    # [num_tokens] int32 the answer, without what was sampled beyond its end
    token_ids: IntArray
    status: FinishReason
    weights_version: int = 0  # of the policy when the request ended
    name: str = ""  # that its client knows it by; in a history it is `request_id`
    epoch: int = 0  # from 0: a problem's answers of one epoch are each other's siblings
    reward: float | None = None  # as last reported; None: not reported (yet)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens for one request. Parents come before children, and every prefix is the best tree of its size."""

    # [N] drafted tokens
    token_ids: IntArray
    # [N] node -> index of its parent, ROOT for depth 1
    parents: IntArray
    # [N] natural log of the estimated probability that the node is accepted given that its parent is
    log_q: FloatArray
    # [N] node -> index into the engine's list of drafters
    source: IntArray

    @property
    def size(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What one engine step cost, as the worker saw it."""

    # running requests
    batch: int
    # rows of the forward pass, prefill and draft tokens included
    rows: int
    # draft nodes among the rows
    nodes: int
    # root-to-leaf paths beyond the first of each tree
    branches: int
    # tokens the step yielded
    tokens: int
    # wall-clock milliseconds from the step's beginning to the next one's; the worker's own share if the engine idled
    step_ms: float
    # no prompt tokens among the rows
    is_decode_only: bool
    # requests that had drafts
    trees: int = 0
    # tokens in the KV cache that the step attended to, all requests together
    context: int = 0
    # requests that wait for a place in the batch
    waiting: int = 0
    # milliseconds of `step_ms` that went into drafts: asking drafters and choosing among what they proposed
    ask_ms: float = 0.0


SOURCES = 16
"""Drafters that are told apart: a node's source lies below it."""
TENTHS = 10
"""Equally wide ranges of probability, in which acceptance is counted."""


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """The draft trees of a batch, one behind another. Drafters make it, `merge_select` cuts it, verification walks it.

    In each tree parents come before children, and every prefix is the best tree of its size.
    """

    # [R] requests, in the batch's order; one without a draft has no nodes
    request_ids: Sequence[str]
    # [R + 1] int32: first node of each request; the last entry is N
    node_start: IntArray
    # [N] int32: drafted tokens
    token_ids: IntArray = field(repr=False)
    # [N] int32: node -> its parent, counted from its own request's first node; ROOT for depth 1
    parents: IntArray = field(repr=False)
    # [N] float32: natural log of the drafter's probability that the node is accepted given that its parent is
    log_q: FloatArray = field(repr=False)
    # [N] int32: node -> index into the engine's list of drafters
    source: IntArray = field(repr=False)
    # [N] int32: node -> its depth, 1 below the root
    depth: IntArray = field(repr=False)

    # of the columns, looked at too often in a step to be counted anew each time
    num_requests: int = field(init=False, repr=False, compare=False)
    num_nodes: int = field(init=False, repr=False, compare=False)
    # [R] int32: nodes of each request
    sizes: IntArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fill = object.__setattr__
        fill(self, "num_requests", len(self.request_ids))
        fill(self, "num_nodes", len(self.token_ids))
        fill(self, "sizes", self.node_start[1:] - self.node_start[:-1])  # np.diff costs several times as much

    def tree(self, index: int) -> DraftTree:
        """One request's tree, for tests and for eyes: a step never takes a batch apart."""
        own = slice(int(self.node_start[index]), int(self.node_start[index + 1]))
        return DraftTree(self.token_ids[own], self.parents[own], self.log_q[own], self.source[own])


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """The running requests that may be drafted for in the next step, and what each of them allows."""

    # [R]
    views: Sequence[RequestView]
    # [R] int32: most draft tokens: the request's own limit and the room that was left for it; 0 where nothing may be
    max_nodes: IntArray
    # [R] int32: most levels: a draft of d levels yields up to d + 1 tokens, and more than the request may have is waste
    max_depth: IntArray
    # [R] bool: no branches
    is_chain: BoolArray
    # [R] of the views
    request_ids: Sequence[str]
    # [R] int32: tokens that each has, prompt included; a view's own move on, these stay
    num_tokens: IntArray
    # [R + 1] int32: first of each request's end tokens; the last entry is E
    end_start: IntArray
    # [E] int32: the views' end tokens, request after request
    end_ids: IntArray

    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.views))

    @classmethod
    def of(cls, views: Sequence[RequestView], *, may_branch: bool = True) -> RequestBatch:
        """Of these requests, as they stand; with `may_branch` False nobody may have branches, whatever its kind."""
        levels = [0 if v.shape is DraftMode.OFF else v.max_new_tokens - 1 for v in views]
        depth = np.minimum(np.maximum(np.array(levels, np.int64), 0), MOST_NODES)
        nodes = np.minimum(np.array([v.max_draft_tokens for v in views], np.int64), MOST_NODES)
        nodes[depth == 0] = 0
        end_start = np.zeros(len(views) + 1, np.int32)
        np.cumsum([len(v.ends) for v in views], out=end_start[1:])
        return cls(
            views,
            nodes.astype(np.int32),
            depth.astype(np.int32),
            np.array([not may_branch or v.shape is DraftMode.CHAIN for v in views], np.bool_),
            [v.request_id for v in views],
            np.array([len(v.token_ids) for v in views], np.int32),
            end_start,
            np.concatenate([_NO_INTS, *[v.ends for v in views]]),
        )

    def ends_of(self, index: Sequence[int]) -> IntArray:
        """[K, E] int32 the end tokens of some of its requests, filled up with -1."""
        own = [self.views[i].ends for i in index]
        filled = np.full((len(own), max(map(len, own), default=0)), -1, np.int32)
        for row, ends in zip(filled, own, strict=True):
            row[: len(ends)] = ends
        return filled


MOST_NODES = 64
"""Draft nodes of one request in one step, at most: what the kernels' ancestor masks hold."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """How much drafters are asked for; a budget's answer to a `RequestBatch`, never above what that allows."""

    # [R] int32: most nodes; 0: nothing is wanted
    max_nodes: IntArray
    # [R] int32: most levels
    max_depth: IntArray
    # [R] bool: no branches
    is_chain: BoolArray
    # [R] uint32: bit d: drafter d is wanted; None: all are
    drafters: npt.NDArray[np.uint32] | None = None
    # a few words out of a small set, fit to be a metric's label
    reason: str = ""
    # milliseconds that plain decoding takes for a token, all requests together: what a draft is worth; 0.0: not known
    token_ms: float = 0.0

    @property
    def wants_any(self) -> bool:
        return bool(self.max_nodes.any())

    def wanted(self, drafter: int) -> IntArray:
        """[R] most nodes that one drafter is asked for: 0 where the limits name others."""
        if self.drafters is None:
            return self.max_nodes
        return np.where(self.drafters >> drafter & 1, self.max_nodes, 0).astype(np.int32)


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What the target made of the trees of a step."""

    # [R] int32: accepted nodes of each request, in the trees' order
    num_accepted: IntArray
    # [sum(num_accepted)] int32: accepted nodes, counted from their request's first node, from the root down
    accepted: IntArray


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a budget chose for the next step, and what it expects of that."""

    trees: TreeBatch
    # why as much, or as little: a few words out of a small set, fit to be a metric's label
    reason: str
    is_on: bool = True  # False: drafters were not even asked
    pays: bool = True  # what asking cost is counted; drafters are left alone after some steps that did not
    # [N] float32: probability that the target walks down to each node, as the budget has it; None: it has no idea
    reach: FloatArray | None = field(default=None, repr=False)
    # milliseconds expected of the step, with the drafts and without any; 0.0 where the budget has no expectation
    expected_ms: float = 0.0
    plain_ms: float = 0.0

    @property
    def expected_tokens(self) -> float:
        """Tokens that the drafts are expected to add; 0.0 where the budget has no expectation."""
        return 0.0 if self.reach is None else float(self.reach.sum())


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that is over: what was planned, what was verified, what came of it and what it cost."""

    # None: nothing was planned: drafting was paused, or no room was left for it
    plan: StepPlan | None
    # the trees that went to the target: the plan's, or what the engine had room for
    trees: TreeBatch
    result: VerifyResult
    timing: StepTiming | None = None  # None: not known
    # what the plan was made from; None where there is none
    batch: RequestBatch | None = None
    proposals: Sequence[TreeBatch] = ()  # [P] what each drafter proposed for it


def empty_trees(request_ids: Sequence[str]) -> TreeBatch:
    """No drafts for anybody."""
    start = np.zeros(len(request_ids) + 1, dtype=np.int32)
    return TreeBatch(request_ids, start, _NO_INTS, _NO_INTS, _NO_FLOATS, _NO_INTS, _NO_INTS)


_NO_INTS: IntArray = np.zeros(0, dtype=np.int32)
_NO_FLOATS: FloatArray = np.zeros(0, dtype=np.float32)
_NO_INTS.flags.writeable = _NO_FLOATS.flags.writeable = False
EMPTY_TREE = DraftTree(_NO_INTS, _NO_INTS, _NO_FLOATS, _NO_INTS)
