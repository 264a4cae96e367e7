"""Drafts that come later than the step they were asked for. Pure.

What belongs here: which drafters owe an answer, and what of an answer still holds. A tree that was asked for k tokens
ago is followed along these tokens; what hangs below is the draft for now. Where the tokens leave the tree, the answer
assumed something else, and its drafter is told how much of it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_specrollout.drafters.base import Drafter, Pending
from vllm_specrollout.trees.batch import batch_of, on_host
from vllm_specrollout.trees.follow import below
from vllm_specrollout.types import EMPTY_TREE, DraftTree, RequestBatch, TreeBatch


@dataclass(frozen=True, slots=True)
class _Owed:
    """An answer on its way."""

    answer: Pending
    # request -> tokens it had when it was asked for
    lengths: dict[str, int]


class LateAnswers:
    """At most one answer per drafter is on its way."""

    def __init__(self) -> None:
        # by the drafter's identity
        self.owed: dict[int, _Owed] = {}

    def owes(self, drafter: Drafter) -> bool:
        """Whether an answer of its has not been collected."""
        return id(drafter) in self.owed

    def add(self, drafter: Drafter, answer: Pending, batch: RequestBatch) -> None:
        """The drafter was asked for this batch, and answers later."""
        self.owed[id(drafter)] = _Owed(answer, {view.request_id: len(view.token_ids) for view in batch.views})

    def drop(self, drafter: Drafter) -> None:
        self.owed.pop(id(drafter), None)

    def collected(self, drafter: Drafter, batch: RequestBatch) -> TreeBatch | None:
        """The drafter's trees as far as they hold for the batch as it is now; None: they are not ready."""
        owed = self.owed.get(id(drafter))
        if owed is None or not owed.answer.is_ready():
            return None
        del self.owed[id(drafter)]
        trees = on_host(owed.answer.collect())
        found = {name: i for i, name in enumerate(trees.request_ids)}
        kept: list[DraftTree] = []
        for view in batch.views:
            length = owed.lengths.get(view.request_id)
            if view.request_id not in found or length is None or length > len(view.token_ids):
                kept.append(EMPTY_TREE)
                continue
            tree, passed = below(trees.tree(found[view.request_id]), view.token_ids[length:])
            if tree is None:
                drafter.rollback(view.request_id, length + passed)
            kept.append(tree or EMPTY_TREE)
        return batch_of(batch.request_ids, kept)
