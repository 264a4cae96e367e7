"""One request alone, event by event: a drafter beside its verifier, with the continuations that it enumerates.

Per position the target's token is the drafter's best guess, its second, its third, or none of them. `exits` of them are
drafted behind: 1 is a stream of best guesses, 2 and 3 also draft behind the second and third guess of each position, so
that a miss there does not end the stream. The verifier never waits: what is there is verified, else it decodes plainly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_ROUNDING = 1e-9  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One verifier and one drafter."""

    name: str
    verify_ms: float
    # per draft token verified
    row_ms: float
    # per token of one sequence
    draft_ms: float
    # more of that per further sequence in the drafter's batch
    branch_share: float
    # probability that the target's token is among the drafter's best, best two, best three guesses
    matches: tuple[float, float, float]

    @property
    def plain_ms(self) -> float:
        return self.verify_ms + self.row_ms

    def token_ms(self, branches: int) -> float:
        """A token for each of so many branches."""
        return self.draft_ms * (1.0 + self.branch_share * (branches - 1))


class _Ranks:
    """Which guess of the drafter the target's token is, position by position: 0 the best, 3 none of three."""

    def __init__(self, scene: Scene, rng: np.random.Generator, count: int = 4096) -> None:
        self._scene, self._rng, self._count = scene, rng, count
        self._drawn: list[int] = []

    def next(self) -> int:
        if not self._drawn:
            uniform = self._rng.random(self._count)
            self._drawn = np.searchsorted(self._scene.matches, uniform, side="right").tolist()
        return self._drawn.pop()


def coupled_speed(scene: Scene, window: int, width: int, tokens: int, rng: np.random.Generator) -> float:
    """Tokens per ms: draft a window, then verify it; with `width` guesses at each position, the others being leaves."""
    ranks = _Ranks(scene, rng)
    step_ms = window * scene.draft_ms + scene.plain_ms + scene.row_ms * window * width
    done = steps = 0
    while done < tokens:
        steps += 1
        for _ in range(window):
            rank = ranks.next()
            done += 1
            if rank:
                # a leaf was verified too, so the token behind it is known
                done += rank < width
                break
        else:
            done += 1
    return done / (steps * step_ms)


def ahead_speed(scene: Scene, window: int, exits: int, tokens: int, rng: np.random.Generator) -> float:
    """Tokens per ms: the drafter goes on while the verifier works, at most one window beyond the one it has sent."""
    stream = _Stream(scene, window, exits, _Ranks(scene, rng))
    while stream.tokens < tokens:
        stream.step()
    return stream.tokens / stream.ms


class _Stream:
    def __init__(self, scene: Scene, window: int, exits: int, ranks: _Ranks) -> None:
        self.tokens, self.ms = 0, 0.0
        self._scene, self._window, self._exits, self._ranks = scene, window, exits, ranks
        # drafted tokens beyond the text, and how many complete the window being drafted
        self._ahead, self._left = 0.0, window

    def step(self) -> None:
        """Verify what is complete, and one token of the target's own."""
        scene, exits = self._scene, self._exits
        size = self._left if self._ahead + _ROUNDING >= self._left else 0
        ms = scene.plain_ms + scene.row_ms * size * exits
        # the best guess goes on; behind each position's other guesses, and those of the target's own token, begins one
        drafted = ms / scene.token_ms(1 + (size + 1) * (exits - 1))
        main = min(self._ahead + drafted, self._left + self._window)
        beside = min(drafted, float(self._window))
        self.ms += ms
        right = 0
        while right < size:
            rank = self._ranks.next()
            if rank:
                self._leave(right, rank, beside)
                return
            right += 1
        self.tokens += size + 1
        self._own(self._ranks.next(), main - size, beside, size)

    def _leave(self, right: int, rank: int, beside: float) -> None:
        """A draft was refused; behind a guess that was enumerated the stream goes on."""
        self.tokens += right + 1
        self._begin(0.0)
        if rank < self._exits:
            # the guess was verified as a leaf, so the target's token behind it is known, and begins the continuation
            self.tokens += 1
            if self._ranks.next() == 0:
                self._begin(beside - 1.0)

    def _own(self, rank: int, rest: float, beside: float, size: int) -> None:
        """The target's own token behind all that was verified."""
        left = self._window if size else self._left
        if rank == 0 and rest + _ROUNDING >= 1.0:
            self._ahead, self._left = rest - 1.0, left - 1 if left > 1 else self._window
        elif 0 < rank < self._exits:
            self._begin(beside)
        else:
            self._begin(0.0)

    def _begin(self, drafted: float) -> None:
        """A continuation of which so much is drafted; its window is a new one."""
        self._ahead, self._left = max(drafted, 0.0), self._window
