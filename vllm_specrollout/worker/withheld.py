"""Withheld verdicts: now and then an accepted path is held back, and plain decoding has to find its tokens again. Pure.

Noise is a function of seed and position, so a request that gets the first token of its path alone, and no drafts until
it is as long as the path, must come to the very same tokens. Whatever is wrong with drafted rows on this device, shows;
the answer is right either way, since its tokens are those of plain decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.types import RequestBatch, TreeBatch

STEPS_PER_TOKEN = 250
"""Steps with a draft, counted per request, that pay for one token decoded plainly: 0.4 % of them go into checking."""
WINDOW, MOST_DIFFERING = 100, 3
"""Where ties are to be expected: of the last so many requests compared, so many may differ whatever they are."""
TOKENS_PER_TIE, TIMES = 130, 3
"""One tie in so many tokens is the most that was measured (random weights, docs/concepts/exactness.md). Chance may
bring so many times as many."""
SELF_CHECK = "self-check"
"""What failed, where tokens were not those of plain decoding, and why nothing is drafted since."""
_NEVER = 1 << 60


class SelfCheckError(RuntimeError):
    """What the target made of drafts cannot be right."""


@dataclass(slots=True)
class _Held:
    """What is left of one request's path."""

    # the next one first
    tokens: list[int]
    # tokens that the request has, prompt included, when it gets the first of them
    at: int
    weights_version: int
    # the step had branches, so it was attended to as trees are
    has_branches: bool
    # tokens compared
    checked: int = 0


class Withheld:
    """Chooses verdicts to withhold, remembers them, and compares.

    Args:
        guard: told of a difference that ties do not explain; a strict one raises it.
        stop: ends all drafting.
        tell: told how many tokens were compared, and how many of them (1 or 0) differed.
    """

    def __init__(self, guard: Guard, stop: Callable[[], None], tell: Callable[[int, int], None]) -> None:
        self._guard, self._stop, self._tell = guard, stop, tell
        self.is_on = True
        self.is_exact = False
        """Whether drafted rows have the bits of plain ones here, so that no tie explains a difference."""
        self.may_branch = True
        self.held: dict[str, _Held] = {}
        """Requests that decode plainly for the comparison."""
        self.drafted = 0
        """Drafts verified so far, one per request and step."""
        self.due = STEPS_PER_TOKEN
        """So many of them pay for the next verdict."""
        self.checked = self.differing = 0
        # tokens decoded plainly for this, levels of the deepest draft looked at, requests chosen
        self._spent = self._deepest = self._turn = 0
        # of the requests compared last: tokens, and how many of them (1 or 0) differed
        self._outcomes: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def end(self) -> None:
        """Nothing is checked any more."""
        self.is_on, self.due = False, _NEVER
        self.held.clear()

    def narrow(self, batch: RequestBatch) -> None:
        """Take from the batch what may not be drafted: anything for who is held, branches after a fault."""
        for i, name in enumerate(batch.request_ids):
            if name in self.held:
                batch.max_nodes[i] = 0
        if not self.may_branch:
            batch.is_chain[:] = True

    def choose(self, trees: TreeBatch) -> str:
        """The request whose verdict is withheld if these trees are verified; empty: none yet.

        Called when `drafted` has come to `due`. What is paid for is the deepest path there can be: so no request and no
        depth is compared more often than others, and never more is spent than was earned.

        Args:
            trees: some of them have nodes.
        """
        self._deepest = max(self._deepest, int(trees.depth.max()))
        self.due = STEPS_PER_TOKEN * (self._spent + self._deepest)
        if self.drafted < self.due:
            return ""
        drafted = np.flatnonzero(trees.sizes)
        self._turn += 1
        return trees.request_ids[drafted[self._turn % len(drafted)]]

    def hold(
        self, request_id: str, tokens: Sequence[int], at: int, weights_version: int, *, has_branches: bool
    ) -> None:
        """A verdict was withheld.

        Args:
            tokens: of the path, behind the one that the request got; there is at least one.
            at: tokens that the request now has, prompt included.
            weights_version: that the step computed with.
            has_branches: some request of the step had branches.
        """
        if self.is_on:
            self.held[request_id] = _Held(list(tokens), at, weights_version, has_branches)
            self._spent += len(tokens)
            self.due = STEPS_PER_TOKEN * (self._spent + self._deepest)

    def drop(self, request_id: str) -> None:
        """It is over, or loses its place."""
        self.held.pop(request_id, None)

    def compare(self, request_id: str, tokens: Sequence[int], at: int, weights_version: int) -> None:
        """A request that is held has decoded on.

        Args:
            tokens: that it got; there is at least one.
            at: tokens that it had before.
            weights_version: the newest, as far as is known.

        Raises:
            SelfCheckError: they differ beyond what ties explain, and the guard is strict.
        """
        held = self.held[request_id]
        if at != held.at or weights_version != held.weights_version:
            del self.held[request_id]  # another text, or another policy
            return
        own, held.tokens = held.tokens[: len(tokens)], held.tokens[len(tokens) :]
        same = next((i for i, token in enumerate(own) if token != tokens[i]), len(own))
        differing = int(same < len(own))
        held.at, held.checked = held.at + len(own), held.checked + same + differing
        self.checked, self.differing = self.checked + same + differing, self.differing + differing
        self._tell(same + differing, differing)
        if not differing and held.tokens:
            return
        del self.held[request_id]  # behind a difference the path is void
        self._outcomes.append((held.checked, differing))
        if differing and (self.is_exact or self._are_too_many()):
            self._fail(
                f"request {request_id}: the verified draft had token {own[same]} behind {at + same} tokens, and plain"
                f" decoding has {tokens[same]} there; {sum(count for _, count in self._outcomes)} of the last"
                f" {len(self._outcomes)} requests compared differ",
                held.has_branches,
            )

    def _are_too_many(self) -> bool:
        """Whether more of the last requests differ than ties explain."""
        tokens, differing = map(sum, zip(*self._outcomes, strict=True))
        return differing > max(MOST_DIFFERING, TIMES * tokens / TOKENS_PER_TIE)

    def _fail(self, cause: str, has_branches: bool) -> None:
        if has_branches and not self.may_branch:
            return  # it was held before they were given up
        self._outcomes.clear()
        if has_branches:
            self.may_branch, effect = False, "drafts are chains from now on"
        else:
            effect = self.give_up()
        self._guard.failed(SELF_CHECK, SelfCheckError(cause), effect, is_last=True)

    def give_up(self) -> str:
        """Drafting ends for good; returns what to say of it."""
        self.end()
        self._stop()
        return "nothing is drafted from now on, and answers are those of plain decoding"
