"""In which order waiting requests get their places: those expected to be long first.

Pure: lengths in, an order out. Who carries it out, and when, is not known here.

A rollout ends with its last answer. Where more requests wait than have places, one long answer that starts late runs on
alone, in steps that hardly anything else shares; started first, it runs beside the others. Longest first is Graham's
rule for jobs on equal machines (SIAM J. Appl. Math. 17, 1969): with lengths known, its makespan is at most 4/3 of the
best there is, where any other order may take twice the best.

It also has the longest answers run at once. Where the KV cache is too small for that, some would be pushed out of it
and computed again, which costs more than the order gains: then places are given in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_specrollout.scheduling.lengths import Lengths

WINDOW = 16_384
"""Arrivals are cut into windows of so many: who came in an earlier one goes first, so none starves."""
_OFTEN, _SELDOM = 64, 16  # places given between two orderings: a share of the queue, but at least so many


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request without a place, or one that has it."""

    problem_id: str
    # an answer's limit in tokens
    max_new_tokens: int
    # of its arrival, counted since the queue was last empty
    number: int
    # had a place before: it goes first, and what it has computed may still be there
    is_preempted: bool = False
    # tokens of the prompt, and of the answer so far
    num_prompt: int = 0
    generated: int = 0


class Queue:
    """Remembers how long answers became, and orders by that."""

    def __init__(self) -> None:
        self._lengths = Lengths()
        self._is_ordered = False
        self._left = 0

    def observe(self, problem_id: str, length: int) -> None:
        """An answer ended by itself, or at its limit, after `length` tokens."""
        self._lengths.observe(problem_id, length)

    def arrive(self) -> None:
        """A request has come: what waits is to be ordered anew."""
        self._is_ordered = False

    def is_due(self, waiting: int, places: int) -> bool:
        """Whether to order the queue before so many of the waiting requests get places. Called whenever some do."""
        if not self._lengths.num_known or places <= 0 or waiting <= places:
            return False
        self._left -= places
        if self._is_ordered and self._left > 0:
            return False
        self._is_ordered, self._left = True, max(waiting // _OFTEN, _SELDOM)
        return True

    def can_be_longest_first(self, requests: Sequence[Waiting], places: int, capacity: int, block_size: int) -> bool:
        """Whether the longest of these requests, waiting and running ones, fit into the KV cache side by side.

        Args:
            places: requests that run at once.
            capacity: tokens that the KV cache holds.
            block_size: tokens per block, of which each request leaves half a one empty on average.
        """
        sizes = sorted(
            (
                one.num_prompt
                + self._lengths.expected_total(one.problem_id, one.generated, one.max_new_tokens)
                + block_size / 2
                for one in requests
            ),
            reverse=True,
        )
        return sum(sizes[:places]) <= capacity

    def order(self, waiting: Sequence[Waiting], is_longest_first: bool = True) -> list[int]:
        """Indices into `waiting`, the first to get a place first. Of equals, as unknown ones are, the earlier one.

        Args:
            is_longest_first: False: in the order of their arrival, but for preempted ones, which go first.
        """
        expected: dict[tuple[str, int], float] = {}

        def rank(index: int) -> tuple[bool, int, float]:
            one = waiting[index]
            if one.is_preempted:
                return False, 0, 0.0
            if not is_longest_first:
                return True, one.number, 0.0
            key = (one.problem_id, one.max_new_tokens)
            if key not in expected:
                expected[key] = self._lengths.expected_total(one.problem_id, 0, one.max_new_tokens)
            return True, one.number // WINDOW, -expected[key]

        return sorted(range(len(waiting)), key=rank)
