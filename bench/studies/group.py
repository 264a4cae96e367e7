"""One verifier with its drafter: steps of a batch, in which windows are verified while further ones are drafted.

Source: SpecActor, section 4.1. What belongs here: how long a step takes and what it yields. Who runs where is the
rollout's affair. Each verification also yields the target's own token behind what it accepts. Where the stream of
drafts goes on there, that token is compared with it: equal, and the stream stays; else the drafter begins anew.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from vllm_specrollout.bench.studies.formulas import Floats, Ints, StepLine

from vllm_specrollout.errors import ConfigError

_ROUNDING = 1e-9  # tokens: a wait that ends with a window must find it complete
_LONGEST_RUN = 1000  # no window is longer; it keeps the table small


class Mode(Enum):
    """How a group drafts."""

    # one token per request and step
    PLAIN = "plain"
    # draft a window, then verify it, both on the clock
    COUPLED = "coupled"
    # the drafter goes on while the verifier works, at most one window beyond the one it has sent; a request whose
    # window is not complete decodes plainly
    DECOUPLED = "decoupled"
    # so too, but as the paper has it: a request whose window is not complete is left out of the step
    WAITING = "decoupled, waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All requests of one rollout."""

    # [N] tokens to generate, int
    length: Ints
    # [M, N] probability that a token drafted by method m for request n is right, when those before it are
    acceptance: Floats

    def __post_init__(self) -> None:
        if not len(self.length) or self.length.min() < 1:
            raise ConfigError("a rollout has no request, or one without tokens", "give lengths of at least 1")
        if not ((self.acceptance >= 0.0) & (self.acceptance <= 1.0)).all():
            raise ConfigError("an acceptance lies outside 0 to 1", "give probabilities")


class Guesses:
    """Which draft tokens are right: drawn once per request, position and method, for all copies of a request alike.

    Exact verification makes every copy of a request yield the same tokens, and a drafter that reads the same text
    drafts the same. So arms of a study that differ in scheduling alone see the same guesses.

    Args:
        rng: the source of chance; each method has a child of its own, so that one more method changes no other.
    """

    def __init__(self, work: Workload, rng: np.random.Generator) -> None:
        # [N] where each request's positions begin in the tables
        self._begin: Ints = np.cumsum(work.length) - work.length
        # [M] tables [sum of lengths]: how many tokens from this one on are guessed right, up to the first miss
        self._runs: list[NDArray[np.int16]] = []
        for acceptance, child in zip(work.acceptance, rng.spawn(len(work.acceptance)), strict=True):
            is_right = child.random(int(work.length.sum())) < np.repeat(acceptance, work.length)
            places = np.arange(len(is_right))
            misses = np.where(is_right, len(is_right), places)
            nearest = np.minimum.accumulate(misses[::-1])[::-1]
            self._runs.append(np.minimum(nearest - places, _LONGEST_RUN).astype(np.int16))

    def run(self, method: int, requests: Ints, position: Ints) -> Ints:
        """[R] how many drafts in a row are right from each position on. It may count beyond a request's end."""
        return self._runs[method][self._begin[requests] + position].astype(np.int64)


class Group:
    """A verifier, the drafter beside it, and its copies of the requests that it runs: arrays of one entry each.

    A request may run in several groups at once; each of them has its own copy.

    Args:
        drafters: a line per method: milliseconds per token of a batch.
        length: [N] tokens of each request, int.
    """

    _ARRAYS = ("ids", "position", "window", "ahead", "left")

    def __init__(
        self,
        number: int,
        mode: Mode,
        verifier: StepLine,
        drafters: tuple[StepLine, ...],
        length: Ints,
        guesses: Guesses,
    ) -> None:
        self.number, self.mode, self.method = number, mode, 0
        # `tokens` of all copies, those included that another copy generated too; `drafted`; `wasted`, drafted behind a
        # token that was refused; `excess`, of those the ones beyond the bound of 2 w - 1 per refusal: always 0
        self.counts: Counter[str] = Counter()
        self._verifier, self._drafters, self._length, self._guesses = verifier, drafters, length, guesses
        none: Ints = np.empty(0, dtype=np.int64)
        # [R] request number; tokens generated so far; draft tokens of a whole window: int
        self.ids, self.position, self.window = none, none, none
        # [R] tokens drafted beyond `position`, float: a part of a token is one in the making
        self.ahead: Floats = np.empty(0)
        # [R] tokens beyond `position` that complete the window being drafted, 1 to `window`, int
        self.left = none
        # tokens per request since the last reconfiguration
        self.since = 0.0
        # [R] of the step under way: tokens it yields; draft tokens found right, and those found right or wrong: int
        self._tokens = self.hits = self.trials = none

    @property
    def size(self) -> int:
        return len(self.ids)

    def add(self, ids: Ints, position: Ints, window: int) -> None:
        """Put requests behind those that run; nothing is drafted for them yet."""
        windows = np.full(len(ids), window, dtype=np.int64)
        for name, new in zip(self._ARRAYS, (ids, position, windows, np.zeros(len(ids)), windows), strict=True):
            setattr(self, name, np.concatenate([getattr(self, name), new]))

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the requests whose entry of `mask` ([R], bool) is false."""
        for name in self._ARRAYS:
            setattr(self, name, getattr(self, name)[mask])

    def reconfigure(self, window: Ints) -> None:
        """Give each request a window; of one that is longer than wanted the rest is dropped."""
        self.window = window
        self.left = np.minimum(self.left, window)
        self.ahead = np.minimum(self.ahead, self.left + window)

    def begin(self) -> float:
        """Start a step; returns its milliseconds. There is at least one request."""
        step = {Mode.PLAIN: self._plain, Mode.COUPLED: self._coupled}.get(self.mode, self._decoupled)
        ms = step()
        self.since += float(self._tokens.mean())
        return ms

    def end(self) -> None:
        """Finish the step: requests advance, not beyond their ends."""
        before = int(self.position.sum())
        self.position = np.minimum(self.position + self._tokens, self._length[self.ids])
        self.counts["tokens"] += int(self.position.sum()) - before

    def _plain(self) -> float:
        # nothing changes before the first of them ends, so all steps until then are one event
        steps = int((self._length[self.ids] - self.position).min())
        self._tokens = np.full(self.size, steps, dtype=np.int64)
        return steps * self._verifier.step_ms(self.size)

    def _coupled(self) -> float:
        right = self._judge(self.window)
        self._waste(self.window - right - (right < self.window))
        drafts = int(self.window.sum())
        self.counts["drafted"] += drafts
        self._tokens = right + 1
        return drafting_ms(self._drafters[self.method], self.window) + self._verifier.step_ms(self.size, drafts)

    def _decoupled(self) -> float:
        is_waiting = self.mode is Mode.WAITING
        waited = self._wait() if is_waiting else 0.0
        ready = self.ahead + _ROUNDING >= self.left
        size = np.where(ready, self.left, 0)
        takes_part = ready if is_waiting else np.ones(self.size, dtype=bool)
        ms = self._verifier.step_ms(int(takes_part.sum()), int(size.sum()))
        self._draft(ms)
        right = self._judge(size)
        self._tokens = np.where(takes_part, right + 1, 0)
        self._follow(right, size, ready, takes_part)
        return waited + ms

    def _wait(self) -> float:
        """Until the first window is complete."""
        missing = float((self.left - self.ahead).min())
        if missing <= _ROUNDING:
            return 0.0
        ms = missing * self._drafters[self.method].step_ms(self.size)
        self._draft(ms)
        return ms

    def _draft(self, ms: float) -> None:
        """The drafter goes on for so long: to the end of its window, and one window further."""
        most = self.left + self.window
        busy = int((self.ahead < most).sum())
        if busy:
            before = int(np.floor(self.ahead + _ROUNDING).sum())
            self.ahead = np.minimum(self.ahead + ms / self._drafters[self.method].step_ms(busy), most)
            self.counts["drafted"] += int(np.floor(self.ahead + _ROUNDING).sum()) - before

    def _follow(self, right: Ints, size: Ints, ready: NDArray[np.bool_], takes_part: NDArray[np.bool_]) -> None:
        """What is left of the stream behind the verdict."""
        drafted = np.floor(self.ahead + _ROUNDING).astype(np.int64)
        # the draft in the place of the target's own token; behind a request's last one there is none
        place = np.minimum(self.position + size, self._length[self.ids] - 1)
        agrees = self._guesses.run(self.method, self.ids, place) > 0
        # the stream goes on where the target's own token stands
        stays = takes_part & (right == size) & (drafted > size) & agrees
        # a refused token itself is paid for by the target's token in its place
        self._waste(np.where(takes_part & ~stays, np.maximum(drafted - right - 1, 0), 0))
        left = np.where(ready, self.window, self.left) - 1
        left = np.where(stays & (left > 0), left, self.window)
        ahead = np.where(stays, np.maximum(self.ahead - size - 1, 0.0), 0.0)
        self.left = np.where(takes_part, left, self.left)
        self.ahead = np.where(takes_part, ahead, self.ahead)

    def _judge(self, size: Ints) -> Ints:
        """[R] how many of `size` drafts are right before the first miss."""
        right = np.minimum(self._guesses.run(self.method, self.ids, self.position), size)
        self.hits, self.trials = right, right + (right < size)
        return right

    def _waste(self, waste: Ints) -> None:
        self.counts["wasted"] += int(waste.sum())
        self.counts["excess"] += int(np.maximum(waste - (2 * self.window - 1), 0).sum())


def drafting_ms(line: StepLine, window: Ints) -> float:
    """Milliseconds of drafting windows in one batch: the shorter ones leave it earlier.

    Args:
        window: [R] tokens to draft, int.
    """
    longest, shortest = int(window.max()), int(window.min())
    ms: float = shortest * line.step_ms(len(window))
    return ms + sum(line.step_ms(int((window >= depth).sum())) for depth in range(shortest + 1, longest + 1))
