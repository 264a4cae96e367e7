"""Of a history: names of its answers, what became of a reward, and what a store holds. No files, no vLLM."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

MOST_TAIL = 64
"""Tokens of a prompt that are kept with its answer: the longest context there is."""


_MOST_NAME = 256


def short_name(request_id: str) -> str:
    """The id of a request as it is kept: what is longer than 256 bytes as a digest, whatever its client calls it."""
    data = request_id.encode("utf-8", "surrogatepass")
    return request_id if len(data) <= _MOST_NAME else "long:" + hashlib.blake2b(data, digest_size=16).hexdigest()


class RewardOutcome(Enum):
    """What became of a reported reward."""

    RECORDED = "recorded"
    LATE = "late"
    """Recorded, but its answer's epoch was already over."""
    REPEATED = "repeated"
    """Recorded in place of an earlier one."""
    EARLY = "early"
    """Kept until its request has ended."""
    UNKNOWN = "unknown"
    """Nothing recorded: no such request in this or the last epoch of this engine."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds, and what went wrong."""

    epoch: int
    lowest: int
    """Epoch that may be named now."""
    answers: int
    problems: int
    tokens: int
    files: int
    file_bytes: int
    memory_bytes: int
    """Of the process: compressed answers, all without `history.dir` and otherwise those that are not written yet, and
    what is kept of each answer that may still get a reward."""
    waiting: int
    """Answers that are not in `history.dir` yet: they are written in the background, or could not be."""
    damaged: int
    """Times that an answer or a file could not be read."""
    evicted: int
    """Answers dropped because there was no room for them, in memory or on disk."""
    write_errors: int
    foreign_files: int
    """Files of the directory that are left out, since they are in another vocabulary."""
    foreign_answers: int
    """Times that an answer was left out because it holds tokens that the model does not have."""
    # by RewardOutcome.value
    rewards: dict[str, int]
