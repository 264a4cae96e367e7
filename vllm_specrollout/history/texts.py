"""Earlier answers to the problems asked for, each with its place in one buffer of tokens that a device reads.

What belongs here: which answers lie where, since when, and with which weight. The buffer is a ring: what comes lies
behind what came last, and loses whatever lay there. Who owns the memory executes the `Changes`, and may be late with
them: begins and ends lie within the buffer at any time, so a stale one costs drafts alone.

All calls come from the engine's thread. Answers are read in the background, and come back through a queue.
"""

from __future__ import annotations

import math
import queue
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.errors import logger
from vllm_specrollout.history.background import Background
from vllm_specrollout.history.index_cache import ONE, weight_of
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import Answer, IntArray

MOST_AT_ONCE = 1 << 18
"""Tokens that one `take` hands out at most: 1 MiB, less than a step copies of its own."""
# problems that are read at a time: what is read waits in the host's memory until it is taken
_READS = 8
# of an answer that is there: a place of it, and a token that comes next
_LEAST = 2


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to be written, tokens first; a row is written whole."""

    # (place in the buffer, [n] int32 tokens from there on): two of them at most, which do not overlap
    pieces: tuple[tuple[int, IntArray], ...]
    # [k] int64: rows of the spans, ascending
    rows: npt.NDArray[np.int64]
    # [k, past, 3] int32: of each text its begin and end in the buffer, and eighths of its weight's base-2 logarithm;
    # the nearest text last, and zeros behind it
    spans: IntArray


@dataclass(slots=True)
class TextsStats:
    """What lies in the buffer, and what it went through."""

    texts: int
    tokens: int
    num_bytes: int
    """Of the buffer and the spans, however much is in them."""
    waiting: int
    """Texts that have no place yet."""
    reading: int
    """Problems whose earlier answers are being read, or are to be."""
    evicted: int
    """Texts that went for newer ones."""
    shortened: int
    """Texts without their beginning, since they are too long for the buffer."""
    given_up: int
    """Problems whose earlier answers could not be read."""


@dataclass(slots=True, eq=False)
class _Problem:
    """A problem that has a row, or waits for one."""

    key: str
    # -1: it has none
    row: int = -1
    # requests that run now
    running: int = 0
    # whether its earlier answers are here, or on their way
    is_asked: bool = False
    # by name and epoch: trainers may give the same names in each epoch
    texts: dict[tuple[str, int], _Placed] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Placed:
    """An answer that has a place in the buffer, or will have one."""

    problem: _Problem
    name: str
    epoch: int
    # as the store has it: the higher, the nearer
    nearness: int
    reward: float | None
    # [num_tokens] int32: the last tokens of the prompt, and the answer; None: they are in the buffer
    token_ids: IntArray | None
    num_tokens: int
    is_shortened: bool
    # as `weight_of` has it; 0: it does not draft now
    weight: int = 0
    # among those of its epoch, the older the lower
    number: int = 0
    # its place, counted on from round to round of the ring; -1: it has none yet
    begin: int = -1

    @property
    def order(self) -> tuple[int, int, int]:
        """The nearest comes last."""
        return self.nearness, self.epoch, self.number


class Texts:
    """Problem id -> row of spans, and what to write for it.

    Args:
        config: `max_mib` bounds the buffer and the spans together.
        most_problems: rows; spans take half of the memory at most, so there may be fewer.
        past: texts of a problem, at most.
        most_tokens: of the buffer; default: what the spans leave of `max_mib`.
        reach: tokens of its prompt that a text begins with, at most.
        tile: places that one program of the lookup compares.
        executor: reads from the store. Default: one thread.
    """

    def __init__(
        self,
        config: HistoryConfig,
        store: HistoryStore,
        *,
        most_problems: int,
        past: int,
        most_tokens: int | None = None,
        reach: int = 32,
        tile: int = 256,
        executor: Executor | None = None,
    ) -> None:
        self._config, self._store = config, store
        self._reach, self._tile, self.past = reach, tile, past
        words = config.max_mib << 18
        self.most_problems = min(most_problems, max(words // (6 * past), 1))
        # places are int32
        self.most_tokens = most_tokens or min(words - 3 * past * self.most_problems, (1 << 31) - 1)
        # one call never overwrites what it has written itself
        self._at_once = min(MOST_AT_ONCE, self.most_tokens // 2)
        self._longest = max(min(self._at_once, self.most_tokens // 8), _LEAST)
        self._executor = executor or Background("specrollout-history")
        self._epoch = store.epoch
        # least recently asked for first
        self._problems: OrderedDict[str, _Problem] = OrderedDict()
        self._free = list(range(self.most_problems))[::-1]
        self._owners: list[_Problem | None] = [None] * self.most_problems
        # the latest of each name
        self._named: dict[str, _Placed] = {}
        # those without a place; and those with one, as they lie behind each other in the ring
        self._waiting: OrderedDict[_Placed, None] = OrderedDict()
        self._ring: OrderedDict[_Placed, None] = OrderedDict()
        self._head = self._num_tokens = 0
        # rows whose spans are to be written
        self._dirty = set[int]()
        # [rows + 1] tiles as of the last `take`; and those of the one before it, where they were more. The last row is
        # nobody's
        self._tiles = np.zeros(self.most_problems + 1, np.int64)
        self._most_tiles = np.zeros(self.most_problems + 1, np.int64)
        self._unread: OrderedDict[_Problem, None] = OrderedDict()
        self._handed: queue.SimpleQueue[tuple[_Problem, list[_Placed] | None]] = queue.SimpleQueue()
        # texts that were numbered: upwards as they were added, and downwards as they were read
        self._added = self._read_so_far = 0
        self._reading = self._evicted = self._shortened = self._given_up = 0

    # --- requests ----------------------------------------------------------------------------------------------------

    def want(self, problem_id: str) -> None:
        """A request for the problem runs from now on; call `done` when it does no longer.

        The problem keeps its row meanwhile. It gets none where all rows are those of problems that run.
        """
        self._follow_epoch()
        key = problem_id
        problem = self._problems.setdefault(key, _Problem(key))
        self._problems.move_to_end(key)
        problem.running += 1
        if problem.row < 0:
            self._give_row(problem)
        if problem.row >= 0 and not problem.is_asked:
            problem.is_asked = True
            self._unread[problem] = None
        self._read_more()

    def done(self, problem_id: str) -> None:
        """A request for the problem runs no longer. Its texts stay until their room is needed, or an epoch begins."""
        problem = self._problems.get(problem_id)
        if problem is not None and problem.running:
            problem.running -= 1
            if not problem.running and problem.row < 0:
                del self._problems[problem.key]

    def row(self, problem_id: str) -> int:
        """Where the problem's spans are; -1: nowhere."""
        problem = self._problems.get(problem_id)
        return -1 if problem is None else problem.row

    def add(self, answer: Answer) -> None:
        """An answer of this engine has ended, and is in the store as it is here."""
        self._follow_epoch()
        problem = self._problems.get(answer.problem_id)
        if problem is not None:
            self._added += 1
            self._keep(self._text_of(problem, answer, answer.request_id, 2), self._added)

    def set_reward(self, request_id: str, reward: float) -> None:
        """Weigh an answer anew, if it is here; the store is told apart from this."""
        self._follow_epoch()
        self._receive()
        text = self._named.get(request_id)
        if text is not None:
            text.reward = reward
            self._weigh(text)

    # --- what a device is told ----------------------------------------------------------------------------------------

    def take(self) -> Changes | None:
        """What has changed since the last call; None: nothing.

        It hands out `MOST_AT_ONCE` tokens at most, and leaves the rest to the next call. A text that loses its place
        is out of its row by the same call.
        """
        self._follow_epoch()
        self._receive()
        pieces = self._place()
        self._read_more()
        rows, self._dirty = sorted(self._dirty), set()
        self._most_tiles[:] = self._tiles
        if not rows:
            return None
        spans = np.zeros((len(rows), self.past, 3), np.int32)
        for row, own in zip(rows, spans, strict=True):
            self._tiles[row] = self._fill(own, self._owners[row])
        np.maximum(self._most_tiles, self._tiles, out=self._most_tiles)
        return Changes(pieces, np.array(rows, np.int64), spans)

    def tiles_of(self, rows: IntArray) -> npt.NDArray[np.int64]:
        """[R] tiles that the rows' texts take, by the last `take` or by the one before it, whichever are more.

        Args:
            rows: [R] int32; -1: nobody's.
        """
        return self._most_tiles[rows]

    def stats(self) -> TextsStats:
        return TextsStats(
            texts=len(self._ring),
            tokens=self._num_tokens,
            num_bytes=4 * (self.most_tokens + 3 * self.past * self.most_problems),
            waiting=len(self._waiting),
            reading=len(self._unread) + self._reading,
            evicted=self._evicted,
            shortened=self._shortened,
            given_up=self._given_up,
        )

    def close(self) -> None:
        """Give up what is to be read; one problem may go on being read from a disk that stands still."""
        self._unread.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)

    # --- problems -----------------------------------------------------------------------------------------------------

    def _give_row(self, problem: _Problem) -> None:
        if not self._free:
            idle = next((one for one in self._problems.values() if not one.running), None)
            if idle is None:
                return
            self._evicted += len(idle.texts)
            self._forget(idle)
        problem.row = self._free.pop()
        self._owners[problem.row] = problem

    def _forget(self, problem: _Problem) -> None:
        for text in list(problem.texts.values()):
            self._drop(text)
        del self._problems[problem.key]
        self._unread.pop(problem, None)
        self._owners[problem.row] = None
        self._free.append(problem.row)
        problem.row = -1

    def _follow_epoch(self) -> None:
        """On a new epoch, weigh anew what is in use; what is not will be read anew when its problem comes back."""
        if self._epoch == self._store.epoch:
            return
        self._epoch, oldest = self._store.epoch, self._store.oldest
        for problem in list(self._problems.values()):
            if not problem.running:
                self._forget(problem)
                continue
            for text in list(problem.texts.values()):
                if text.epoch < oldest:
                    self._drop(text)
                else:
                    self._weigh(text)

    # --- texts --------------------------------------------------------------------------------------------------------

    def _text_of(self, problem: _Problem, answer: Answer, name: str, nearness: int) -> _Placed:
        tokens = np.concatenate([answer.prompt_ids[-self._reach :], answer.token_ids])
        kept = tokens[-self._longest :]
        is_shortened = len(kept) < len(tokens)
        return _Placed(problem, name, answer.epoch, nearness, answer.reward, kept, len(kept), is_shortened)

    def _weight(self, epoch: int, reward: float | None) -> int:
        if epoch == self._epoch and not self._config.siblings:
            return 0
        # behind a jump what drafts is no older than the oldest otherwise is
        return weight_of(self._config, min(self._epoch - epoch, self._config.epochs), reward)

    def _weigh(self, text: _Placed) -> None:
        text.weight = self._weight(text.epoch, text.reward)
        if text.begin >= 0:
            self._dirty.add(text.problem.row)

    def _keep(self, text: _Placed, number: int) -> None:
        """Have a text placed. Where its problem has too many, the one that weighs least goes, the oldest first."""
        problem, key = text.problem, (text.name, text.epoch)
        if problem.row < 0 or text.num_tokens < _LEAST or text.epoch < self._store.oldest:
            return
        if key in problem.texts:
            self._drop(problem.texts[key])
        text.number = number
        self._weigh(text)
        problem.texts[key] = text
        if text.name not in self._named or self._named[text.name].epoch <= text.epoch:
            self._named[text.name] = text
        self._waiting[text] = None
        self._shortened += text.is_shortened
        if len(problem.texts) > self.past:
            self._drop(min(problem.texts.values(), key=lambda one: (one.weight, *one.order)))
            self._evicted += 1

    def _drop(self, text: _Placed) -> None:
        del text.problem.texts[text.name, text.epoch]
        if self._named.get(text.name) is text:
            del self._named[text.name]
        self._waiting.pop(text, None)
        if text in self._ring:
            del self._ring[text]
            self._num_tokens -= text.num_tokens
            self._dirty.add(text.problem.row)

    def _place(self) -> tuple[tuple[int, IntArray], ...]:
        """Give texts their places, as many as one call may."""
        runs, begin, left = dict[int, list[IntArray]](), 0, self._at_once
        while self._waiting and (text := next(iter(self._waiting))).num_tokens <= left:
            del self._waiting[text]
            left -= text.num_tokens
            behind = self.most_tokens - self._head % self.most_tokens
            # no text goes on at the buffer's beginning
            text.begin = self._head + (behind if behind < text.num_tokens else 0)
            self._head = text.begin + text.num_tokens
            while self._ring and (first := next(iter(self._ring))).begin < self._head - self.most_tokens:
                self._drop(first)
                self._evicted += 1
                # where nobody asks for it now, it is read again for whoever does
                first.problem.is_asked &= first.problem.running > 0
            at = text.begin % self.most_tokens
            begin = begin if runs and at else at
            runs.setdefault(begin, []).append(text.token_ids)  # type: ignore[arg-type]
            text.token_ids = None
            self._ring[text] = None
            self._num_tokens += text.num_tokens
            self._dirty.add(text.problem.row)
        return tuple((begin, np.concatenate(own)) for begin, own in runs.items())

    def _fill(self, spans: IntArray, problem: _Problem | None) -> int:
        """Write a row's spans [past, 3] over zeros; returns its texts' tiles."""
        texts: Iterable[_Placed] = () if problem is None else problem.texts.values()
        drafting = [text for text in texts if text.begin >= 0 and text.weight]
        drafting.sort(key=lambda text: text.order)
        for span, text in zip(spans, drafting, strict=False):
            begin = text.begin % self.most_tokens
            span[:] = begin, begin + text.num_tokens, round(8 * math.log2(text.weight / ONE))
        # a text's last token is no place
        return sum(-(-(text.num_tokens - 1) // self._tile) for text in drafting)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read_more(self) -> None:
        """Have the next problems read, unless enough of what was read has no place yet."""
        while self._unread and self._reading < _READS and len(self._waiting) < self.past:
            problem, _ = self._unread.popitem(last=False)
            if problem.running:
                self._reading += 1
                self._executor.submit(self._read, problem)
            else:
                problem.is_asked = False

    def _receive(self) -> None:
        """Take over what was read."""
        while not self._handed.empty():
            problem, texts = self._handed.get()
            self._reading -= 1
            self._given_up += texts is None
            problem.is_asked = texts is not None
            self._read_so_far += len(texts or ())
            # older than whatever has come already, since what is read again has lost its place to that
            for number, text in enumerate(texts or (), -self._read_so_far):
                # one that has ended meanwhile is here already
                if (text.name, text.epoch) not in problem.texts:
                    self._keep(text, number)

    def _read(self, problem: _Problem) -> None:
        """In the executor's thread, where nobody looks at an error."""
        texts = None
        try:
            texts = self._nearest(problem)
        except Exception:
            # without them the problem's requests decode without their drafts, and that is all
            logger.exception("answers of the history could not be read")
        self._handed.put((problem, texts))

    def _nearest(self, problem: _Problem) -> list[_Placed]:
        """As many of the problem's answers as a row holds, the nearest last."""
        texts = dict[tuple[str, int], _Placed]()
        for found in reversed(self._store.find(problem.key)):
            if len(texts) == self.past:
                break
            # whether it drafts now is a matter of its epoch alone
            answer = self._store.read(found, problem.key) if self._weight(found.epoch, None) else None
            if answer is not None:
                # engines elsewhere may give the same ids
                name = answer.request_id if found.nearness == 2 else f"{found.number} elsewhere"
                texts.setdefault((name, answer.epoch), self._text_of(problem, answer, name, found.nearness))
        return list(texts.values())[::-1]
