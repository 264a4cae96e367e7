"""The one Protocol of all drafters. A drafter proposes; it never touches the engine's state.

What belongs here: what a drafter is told, and how it answers. Its calls come from the engine's thread, and the step
waits for each of them. A drafter that may wait for a disk, a network or another process therefore brings a thread of
its own, and answers with what it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vllm_specrollout.types import Answer, DraftLimits, RequestBatch, RequestView, TreeBatch, VerifyResult

UNBOUNDED = 1 << 60
"""Tokens that no request comes to."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a drafter is in its engine: what a class that the configuration names is made with."""

    source: int
    """Its index in the engine's list: whose nodes a tree has, and what `DraftLimits.wanted` is asked with."""
    max_draft_tokens: int
    """Most nodes of a draft, whatever the limits of a step are."""
    vocab_size: int
    """Token ids are below it."""


class Drafter(Protocol):
    """Proposes draft trees for a batch of running requests."""

    name: str
    num_sources: int
    """Kinds of nodes that it tells apart, which hold differently often: its own index and those behind it."""
    works_ahead: bool
    """Whether it drafts in a process of its own between the steps: that it has nothing yet says nothing of it."""
    is_lookup: bool
    """Whether it looks up what it says, for a little time per request: to choose the requests takes as long as to ask
    for all of them."""
    is_in_step: bool
    """Whether it runs passes of the target's own workers. What it takes is the budget's to weigh, and no time limit
    holds for it."""
    is_on_ranks: bool
    """Whether several ranks run its passes. All of them must agree on it: it is not tried again after a failure."""
    most_tokens: int
    """Of a request that it drafts for: its own context may be shorter than the target's."""

    def admit(self, view: RequestView) -> None:
        """A request can be drafted for from now on. Called once per request, whatever the budget does."""

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        """Trees over the batch's requests, in order.

        A tree has at most `limits.max_nodes` nodes and `limits.max_depth` levels, is a chain where the limits say so,
        and has parents before their children. The columns are numpy arrays, or arrays on a device with `cpu()`.
        """

    def observe(self, trees: TreeBatch, result: VerifyResult) -> None:
        """What became of a step's trees, whichever drafter made them."""

    def finish(self, ending: Answer) -> None:
        """The request is over (finished, cut off, aborted, perhaps without a token); also called for requests it was
        never asked about."""

    def forget(self, request_id: str) -> None:
        """Drop what is kept for the request: it is over, or preempted and comes back; unknown ids are ignored."""

    def close(self) -> None:
        """It is asked no more: write what is left to write, and let go of what others may use. May come twice."""


class BaseDrafter:
    """What most drafters do with what they are told: nothing."""

    num_sources = 1
    works_ahead = False
    is_lookup = False
    is_in_step = False
    is_on_ranks = False
    most_tokens = UNBOUNDED
    is_resting = False
    """Whether it proposes nothing for now, and is not fed for it: another one does its work."""

    def admit(self, view: RequestView) -> None:
        """Nothing is prepared."""

    def observe(self, trees: TreeBatch, result: VerifyResult) -> None:
        """Nothing to learn."""

    def finish(self, ending: Answer) -> None:
        """Nothing outlives a request."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept per request."""

    def close(self) -> None:
        """Nothing is held."""
