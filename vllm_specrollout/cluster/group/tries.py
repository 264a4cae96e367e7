"""How well drafts of each request are met: what a worker reports of it."""

from __future__ import annotations

from collections.abc import Callable

from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import StepRecord


class Tries(Listener):
    """How many drafted tokens of each request the target got to, and how many of them it sampled itself.

    Args:
        name_of: of an engine's name for a request: its client's.
    """

    def __init__(self, name_of: Callable[[str], str]) -> None:
        self._name_of = name_of
        # request, by its client's name -> (tried, matched)
        self.counts: dict[str, tuple[int, int]] = {}

    def begin(self, request: str) -> None:
        """Count for it, until it is forgotten."""
        self.counts[request] = (0, 0)

    def forget(self, request: str) -> None:
        self.counts.pop(request, None)

    def stepped(self, record: StepRecord) -> None:
        trees = record.trees
        accepted = record.result.num_accepted.tolist()
        for i, (name, own) in enumerate(zip(trees.request_ids, accepted, strict=True)):
            start, end = trees.node_start[i : i + 2]
            request = self._name_of(name)
            # a step is told of when the next one begins: its requests may be over by then
            if end == start or request not in self.counts:
                continue
            tried, matched = self.counts[request]
            # a path that is accepted to its leaf was missed nowhere
            missed = own < int(trees.depth[start:end].max())
            self.counts[request] = (tried + own + missed, matched + own)
