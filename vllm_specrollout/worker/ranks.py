"""A model that drafts on several tensor-parallel ranks: its passes need all of them, and the first one decides.

What belongs here: what the first rank tells the others while it plans a step, and what they do then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_specrollout.worker.drafting import Drafting
from vllm_specrollout.worker.proposing import Enough

Draw = Callable[[torch.Tensor], torch.Tensor]

_DROPPED = "dropped"


class Ranks:
    """All ranks of one engine, seen from one of them.

    Args:
        runner: our model runner.
        drafting: its own; it knows the ranks.
    """

    def __init__(self, runner: Any, drafting: Drafting) -> None:
        self._runner, self._drafting = runner, drafting
        self._has_told = False
        if self._drafting.group is not None:
            self._drafting.last_order = self._last_order

    def order(self, names: Sequence[str], depth: int) -> None:
        """The first rank is about to draft so many levels for these requests."""
        self._drafting.order((self._drafting.numbered(names), depth))

    def follow(self, run: Callable[[Sequence[str], int], Any]) -> None:
        """How another rank takes part in a pass."""

        def do(order: Any) -> None:
            if order == _DROPPED:
                self._runner.model_drafter = None
            else:
                run(self._drafting.named(order[0]), order[1])

        self._drafting.follow = do

    def drawing(self, draw: Draw) -> Draw:
        """`draw` on the first rank; the others are told what it has drawn, or that it is enough."""
        group = self._drafting.group
        if group is None:
            return draw

        def lead(logits: torch.Tensor) -> torch.Tensor:
            tokens = None
            try:
                tokens = draw(logits)
            finally:
                group.broadcast_object(tokens, src=0)
            return tokens

        def follow(logits: torch.Tensor) -> torch.Tensor:
            tokens = group.broadcast_object(None, src=0)
            if tokens is None:
                raise Enough
            return tokens

        return lead if self._drafting.is_drafting else follow

    def _last_order(self) -> str | None:
        """A drafter that was dropped is dropped on all ranks, or they would wait for each other."""
        drafter = self._runner.model_drafter
        is_there = drafter is not None and any(one is drafter for one in self._runner.spec_rollout.drafters)
        if is_there or self._has_told:
            return None
        self._has_told = True
        return _DROPPED
