"""Windows of answers: which rows share an optimiser step, how often each is learned from, and which are held out.

An answer is cut into windows from end to end, at another place each time, so its tail counts as its beginning does. A
window's first rows are context, since a head attends to the rows before it: they do not count. All answers are gone
over once before one is gone over again, and none is more than `passes` times. Every tenth one judges, and trains
nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from .answers import digest_of, is_held_out
from .rows import Rows

CONTEXT = 16
"""Rows before a window that are fed and do not count."""
_WIDEST = 512
"""Rows of a window that judge; the next one has as many for context."""


@dataclass(frozen=True, slots=True)
class Window:
    """Rows `begin` to `end` of an answer; those from `counts` on count."""

    answer: Rows
    begin: int
    counts: int
    end: int


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """B windows of W rows, the shorter ones padded; `ahead` further tokens behind them, where levels look."""

    # [B, W + ahead] int64: the tokens that are fed, level k beginning at place k
    tokens: torch.Tensor
    # [B, W, layers + 1, width]: the target's, of the token before each
    before: torch.Tensor
    # [B, W + ahead, width]: the target's last ones, of the very tokens; its output head says what should be drafted
    last: torch.Tensor
    # [B, W] int64 position in the request
    positions: torch.Tensor
    # [B, W] bool: whether drafts of the row count
    counts: torch.Tensor
    # [B] int64 how many of an answer's tokens lie from the window's first row on
    rest: torch.Tensor


def counted_rows(answer: Rows) -> range:
    """Rows that a draft may begin from: the answer's tokens, but for the last, behind which nothing is known."""
    return range(max(answer.prompt_tokens, 1), len(answer.token_ids) - 1)


class Windows:
    """Answers to learn from, and what is left of each.

    Args:
        width: rows of a window, context included.
        passes: how often an answer is gone over.
        most_judged: rows that judge, at most; the newest ones do.
    """

    def __init__(self, width: int, passes: int, seed: int, most_judged: int = 8192) -> None:
        self._width, self._passes, self._most_judged = width, passes, most_judged
        self._random = random.Random(seed)
        self._answers: dict[bytes, Rows] = {}
        self._judges: dict[bytes, Rows] = {}
        # how often an answer was cut, and the windows that are left: its digest, the rows that count
        self._cut: dict[bytes, int] = {}
        self._left: list[tuple[bytes, int, int]] = []
        self._newest = -1

    def add(self, answer: Rows) -> bool:
        """Keep an answer. Returns whether it is new, and not too short to learn from."""
        digest = digest_of(answer.token_ids.numpy())
        if self.is_done(digest) or digest in self._answers or not counted_rows(answer):
            return False
        if answer.version > self._newest:
            self._renew(answer.version)
        if not is_held_out(answer.token_ids.numpy()):
            # the last weights' answers fill what there is too little of; older ones misguide
            if answer.version >= self._newest - 1:
                self._answers[digest] = answer
        elif answer.version == self._newest:
            self._judges[digest] = answer
            while sum(len(counted_rows(one)) for one in self._judges.values()) > self._most_judged:
                if len(self._judges) == 1:
                    break
                self._judges.pop(next(iter(self._judges)))
        return True

    def is_done(self, digest: bytes) -> bool:
        """Whether an answer was gone over as often as it may be."""
        return self._cut.get(digest, 0) >= self._passes and digest not in self._pending()

    @property
    def num_bytes(self) -> int:
        """Of hidden states that are kept."""
        return sum(one.hidden.nbytes for kept in (self._answers, self._judges) for one in kept.values())

    def has_more(self) -> bool:
        """Whether there is something left to learn from."""
        return bool(self._left) or any(self._cut.get(digest, 0) < self._passes for digest in self._answers)

    def held_out(self) -> list[Rows]:
        return list(self._judges.values())

    def draw(self, batch_rows: int) -> list[Window]:
        """The windows of a step, of some `batch_rows` rows; none: nothing is left to learn from."""
        chosen: list[Window] = []
        num_rows = 0
        while num_rows < batch_rows and (self._left or self._cut_again()):
            digest, counts, end = self._left.pop()
            answer = self._answers.get(digest)
            if answer is None:
                continue
            begin = max(1, counts - CONTEXT)
            chosen.append(Window(answer, begin, counts, end))
            num_rows += end - begin
        return chosen

    def drop_done(self) -> None:
        """Forget hidden states that are of no more use."""
        for digest in [one for one in self._answers if self.is_done(one)]:
            del self._answers[digest]

    def state_dict(self) -> dict[str, Any]:
        """All but the answers, which are added again."""
        return {"cut": dict(self._cut), "left": list(self._left), "random": self._random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cut, self._left = dict(state["cut"]), [tuple(one) for one in state["left"]]
        version, internal, gauss = state["random"]
        self._random.setstate((version, tuple(internal), gauss))

    def _pending(self) -> set[bytes]:
        return {digest for digest, *_ in self._left}

    def _renew(self, version: int) -> None:
        self._newest = version
        self._judges.clear()
        for digest in [one for one, answer in self._answers.items() if answer.version < version - 1]:
            del self._answers[digest]

    def _cut_again(self) -> bool:
        """Cut the answers that were cut least; False: there is none left."""
        fewest = min((self._cut.get(digest, 0) for digest in self._answers), default=self._passes)
        if fewest >= self._passes:
            return False
        most = self._width - CONTEXT
        for digest, answer in self._answers.items():
            if self._cut.get(digest, 0) != fewest:
                continue
            self._cut[digest] = fewest + 1
            rows = counted_rows(answer)
            # of about equal lengths, since the shorter ones of a step are padded; one more where chance says so
            count = -(-(len(rows) + self._random.randrange(most)) // most)
            bounds = [rows.start + len(rows) * i // count for i in range(count + 1)]
            self._left += [(digest, begin, end) for begin, end in pairwise(bounds) if begin < end]
        self._random.shuffle(self._left)
        return True


def whole(answers: Iterable[Rows]) -> list[Window]:
    """Each answer as one window with the end of its prompt; a long one as several, so that memory is bounded."""
    return [
        Window(one, max(1, begin - _WIDEST), begin, min(begin + _WIDEST, counted.stop))
        for one in answers
        for counted in [counted_rows(one)]
        for begin in range(counted.start, counted.stop, _WIDEST)
    ]


def batch_of(windows: Sequence[Window], num_levels: int) -> WindowBatch:
    """The windows side by side; levels 1 to `num_levels` are asked of each row."""
    ahead, count = num_levels - 1, len(windows)
    width = max(one.end - one.begin for one in windows)
    hidden = windows[0].answer.hidden
    tokens = torch.zeros(count, width + ahead, dtype=torch.int64)
    before = torch.zeros(count, width, *hidden.shape[1:], dtype=hidden.dtype)
    last = torch.zeros(count, width + ahead, hidden.shape[2], dtype=hidden.dtype)
    counts = torch.zeros(count, width, dtype=torch.bool)
    for i, one in enumerate(windows):
        length = one.end - one.begin
        behind = one.answer.token_ids[one.begin : one.end + ahead]
        tokens[i, : len(behind)] = behind
        before[i, :length] = one.answer.hidden[one.begin - 1 : one.end - 1]
        last[i, : len(behind)] = one.answer.hidden[one.begin : one.end + ahead, -1]
        counts[i, one.counts - one.begin : length] = True
    begins = torch.tensor([one.begin for one in windows])
    rest = torch.tensor([len(one.answer.token_ids) for one in windows]) - begins
    return WindowBatch(tokens, before, last, begins[:, None] + torch.arange(width), counts, rest)
