"""A ring of answers: the token ids of what ended lately, for the engine to compute their hidden states once more.

What belongs here: which answers are kept, and which of them are handed out. An answer is kept whole, however long, for
heads learn most from the tail. Until this version of the weights has long answers of its own, those of the one before
stand in: most of a rollout's answers end early, and its longest last (TLT's one-step offset).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import Answer, FinishReason, IntArray

MOST_TOKENS = 1 << 22
"""Of all answers kept, prompts included: 16 MiB."""
MOST_TIMES = 3
"""Times that an answer is handed out, since a request that arrives ends what is computed."""
_HELD_OUT = 10  # of so many answers one judges, and trains nothing


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """One answer with its prompt."""

    # [n] int32: of the prompt, then of the answer
    token_ids: IntArray
    # how many of them are the prompt's
    prompt_tokens: int
    # of the weights that sampled its last token
    version: int


class AnswerRing(Listener):
    """Of one engine; the oldest answer goes first."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most, self.num_tokens = most_tokens, 0
        # key of the tokens -> the answer, the oldest first, and how often it was handed out
        self._kept: dict[int, KeptAnswer] = {}
        self._times: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def finished(self, ending: Answer) -> None:
        if ending.status is FinishReason.ABORTED or not len(ending.token_ids):
            return
        token_ids = np.concatenate([ending.prompt_ids, ending.token_ids]).astype(np.int32)
        key = key_of(token_ids)
        if key in self._kept:  # sampled again, it is as new as its newest copy, and was seen as often
            self.num_tokens -= len(self._kept.pop(key).token_ids)
        self._kept[key] = KeptAnswer(token_ids, len(ending.prompt_ids), ending.weights_version)
        self._times.setdefault(key, 0)
        self.num_tokens += len(token_ids)
        while self.num_tokens > self._most:
            oldest = next(iter(self._kept))
            self.num_tokens -= len(self._kept.pop(oldest).token_ids)
            del self._times[oldest]

    def take(self, version: int, most_tokens: int) -> list[KeptAnswer]:
        """Answers to be computed by the weights of this version: its own, then long ones of the version before.

        Those that were handed out least often come first, of them the longest. Together they have at most so many
        tokens, but there is one at least, if any is left.
        """
        own = [key for key, one in self._kept.items() if one.version == version]
        found = self._in_order(own)
        earlier = [one.version for one in self._kept.values() if one.version < version]
        if earlier:
            longest = max((len(self._kept[key].token_ids) for key in own), default=0)
            found += self._in_order(
                key for key, one in self._kept.items() if one.version == max(earlier) and len(one.token_ids) > longest
            )
        taken: list[KeptAnswer] = []
        for key in found:
            answer = self._kept[key]
            if not taken or len(answer.token_ids) <= most_tokens:
                self._times[key] += 1
                most_tokens -= len(answer.token_ids)
                taken.append(answer)
        return taken

    def computed(self, key: int) -> None:
        """A trainer has it whole: it is handed out no more."""
        if key in self._times:
            self._times[key] = MOST_TIMES

    def _in_order(self, keys: Iterable[int]) -> list[int]:
        left = [key for key in keys if self._times[key] < MOST_TIMES]
        return sorted(left, key=lambda key: (self._times[key], -len(self._kept[key].token_ids)))


def is_held_out(token_ids: IntArray) -> bool:
    """Whether an answer, [n] int32 with its prompt, judges what was learned of the others: always the same tenth."""
    return int.from_bytes(digest_of(token_ids)[:4], "little") % _HELD_OUT == 0


def key_of(token_ids: IntArray) -> int:
    """What it is known by on its way through the engine."""
    return int.from_bytes(digest_of(token_ids)[:7], "little")


def digest_of(token_ids: IntArray) -> bytes:
    """What an answer, [n] int32 with its prompt, is known by in every process."""
    return hashlib.blake2b(np.ascontiguousarray(token_ids, dtype="<i4").tobytes(), digest_size=16).digest()
