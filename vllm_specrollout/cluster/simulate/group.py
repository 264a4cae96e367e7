"""One verifier with its drafter: steps of a batch, in which windows are verified while further ones are drafted.

Source: SpecActor, section 4.1. What belongs here: how long a step takes and what it yields. Who runs where is the
rollout's affair. Three modes:

- plain: one token per request and step;
- coupled: draft a window, then verify it, both on the clock;
- decoupled: the drafter goes on while the verifier works, at most one window beyond the one it has sent. A request
  whose window is not complete decodes plainly, or, as the paper has it, waits.

Each verification also yields the target's own token behind what it accepts. Where the stream of drafts goes on there,
that token is compared with it: equal, and the stream stays; else the drafter begins anew behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

import numpy as np

from vllm_specrollout.cluster.simulate.copies import Copies
from vllm_specrollout.cluster.simulate.guesses import Guesses
from vllm_specrollout.cluster.simulate.step_line import StepLine
from vllm_specrollout.cluster.simulate.workload import Ints
from vllm_specrollout.decoupled.rates import Mode

_ROUNDING = 1e-9  # tokens: a wait that ends with a window must find it complete


class Waiting(Enum):
    """What becomes of a decoupled request whose window is not complete when a verification starts."""

    # it decodes plainly
    NEVER = "never"
    # it decodes plainly, unless nobody has a window: then the verifier waits for the first
    IF_NOBODY = "if nobody has a window"
    # it is left out, as the paper has it
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to draft."""

    name: str
    # milliseconds per token of a batch
    line: StepLine


@dataclass(slots=True, kw_only=True)
class Counts:
    """What a group did; groups' counts add up."""

    steps: int = 0
    # of all its copies, those included that another copy generated too
    tokens: int = 0
    drafted: int = 0
    # drafted behind a token that was refused
    wasted: int = 0
    # of those, the ones beyond the bound of 2 w - 1 per refusal: always 0
    excess: int = 0
    # times that a request had no complete window
    stalls: int = 0
    # the verifier waited because no request had one
    wait_ms: float = 0.0
    busy_ms: float = 0.0

    def add(self, other: Counts) -> None:
        """Sum up."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Group:
    """A verifier and the drafter beside it.

    Args:
        number: of the group.
        verifier: milliseconds of a verification.
        length: [N] tokens of each request, int.
        guesses: which drafts are right.
    """

    def __init__(
        self, number: int, verifier: StepLine, mode: Mode, length: Ints, guesses: Guesses, waiting: Waiting
    ) -> None:
        self.number = number
        self.mode = mode
        self.method = 0
        self.copies = Copies()
        self.counts = Counts()
        # tokens per request since the last reconfiguration
        self.since = 0.0
        self._verifier = verifier
        self._length = length
        self._guesses = guesses
        self._waiting = waiting
        # [R] what the step under way yields, int
        self._tokens: Ints = np.empty(0, dtype=np.int64)
        # [R] draft tokens found right, and those found right or wrong, in the step under way, int
        self.hits: Ints = self._tokens
        self.trials: Ints = self._tokens

    def begin(self, method: Method) -> float:
        """Start a step; returns its milliseconds. There is at least one request."""
        step = {Mode.PLAIN: self._plain, Mode.COUPLED: self._coupled, Mode.DECOUPLED: self._decoupled}[self.mode]
        ms = step(method)
        self.counts.steps += 1
        self.counts.busy_ms += ms
        self.since += float(self._tokens.mean())
        return ms

    def end(self) -> None:
        """Finish the step: requests advance, not beyond their ends."""
        copies = self.copies
        before = int(copies.position.sum())
        copies.position = np.minimum(copies.position + self._tokens, self._length[copies.ids])
        self.counts.tokens += int(copies.position.sum()) - before

    def _plain(self, method: Method) -> float:
        # nothing changes before the first of them ends, so all steps until then are one event
        copies = self.copies
        steps = int((self._length[copies.ids] - copies.position).min())
        self._tokens = np.full(copies.size, steps, dtype=np.int64)
        self.counts.steps += steps - 1
        return steps * self._verifier.step_ms(copies.size)

    def _coupled(self, method: Method) -> float:
        copies = self.copies
        window = copies.window
        right = self._guesses.accepted(self.method, copies.ids, copies.position, window)
        self._note(right, window)
        self._waste(window - right - (right < window), window)
        self.counts.drafted += int(window.sum())
        self._tokens = right + 1
        return drafting_ms(method.line, window) + self._verifier.step_ms(copies.size, int(window.sum()))

    def _decoupled(self, method: Method) -> float:
        copies = self.copies
        waited = 0.0 if self._waiting is Waiting.NEVER else self._wait(method)
        ready = copies.ahead + _ROUNDING >= copies.left
        size = np.where(ready, copies.left, 0)
        takes_part = ready if self._waiting is Waiting.ALWAYS else np.ones(copies.size, dtype=bool)
        self.counts.stalls += copies.size - int(ready.sum())
        ms = self._verifier.step_ms(int(takes_part.sum()), int(size.sum()))
        self._draft(method, ms)
        right = self._guesses.accepted(self.method, copies.ids, copies.position, size)
        self._note(right, size)
        self._tokens = np.where(takes_part, right + 1, 0)
        self._follow(right, size, ready, takes_part)
        return waited + ms

    def _wait(self, method: Method) -> float:
        """Until the first window is complete."""
        copies = self.copies
        missing = float((copies.left - copies.ahead).min())
        if missing <= _ROUNDING:
            return 0.0
        ms = missing * method.line.step_ms(copies.size)
        self._draft(method, ms)
        self.counts.wait_ms += ms
        return ms

    def _draft(self, method: Method, ms: float) -> None:
        """The drafter goes on for so long."""
        copies = self.copies
        most = copies.most_ahead()
        busy = int((copies.ahead < most).sum())
        if busy:
            before = int(np.floor(copies.ahead + _ROUNDING).sum())
            copies.ahead = np.minimum(copies.ahead + ms / method.line.step_ms(busy), most)
            self.counts.drafted += int(np.floor(copies.ahead + _ROUNDING).sum()) - before

    def _follow(self, right: Ints, size: Ints, ready: np.ndarray, takes_part: np.ndarray) -> None:
        """What is left of the stream behind the verdict."""
        copies = self.copies
        drafted = np.floor(copies.ahead + _ROUNDING).astype(np.int64)
        # the draft in the place of the target's own token; behind a request's last one there is none
        place = np.minimum(copies.position + size, self._length[copies.ids] - 1)
        agrees = self._guesses.run(self.method, copies.ids, place) > 0
        is_whole = right == size
        reaches = drafted > size  # the stream goes on where the target's own token stands
        stays = takes_part & is_whole & reaches & agrees
        # a refused token itself is paid for by the target's token in its place
        self._waste(np.where(takes_part & ~stays, np.maximum(drafted - right - 1, 0), 0), copies.window)
        left = np.where(ready, copies.window, copies.left) - 1
        left = np.where(stays & (left > 0), left, copies.window)
        ahead = np.where(stays, np.maximum(copies.ahead - size - 1, 0.0), 0.0)
        copies.left = np.where(takes_part, left, copies.left)
        copies.ahead = np.where(takes_part, ahead, copies.ahead)

    def _note(self, right: Ints, size: Ints) -> None:
        self.hits, self.trials = right, right + (right < size)

    def _waste(self, waste: Ints, window: Ints) -> None:
        self.counts.wasted += int(waste.sum())
        self.counts.excess += int(np.maximum(waste - (2 * window - 1), 0).sum())


def drafting_ms(line: StepLine, window: Ints) -> float:
    """Milliseconds of drafting windows in one batch: the shorter ones leave it earlier.

    Args:
        window: [R] tokens to draft, int.
    """
    longest, shortest = int(window.max()), int(window.min())
    ms: float = shortest * line.step_ms(len(window))
    return ms + sum(line.step_ms(int((window >= depth).sum())) for depth in range(shortest + 1, longest + 1))
