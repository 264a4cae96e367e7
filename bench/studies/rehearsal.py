"""Rehearsal of decoupled drafting: the real lines, with a clock and tokens that are drawn. Pure.

What belongs here: a verifier and a drafter as times and match rates, event by event. The lines are those of line.py,
and what fits is said by the core: so a rehearsal and an engine differ in their times and tokens alone. The formulas of
rates.py are of windows, without exits behind exits.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specrollout._core import Received
from vllm_specrollout.cluster.line import Line, Node, NoiseTrial, Survival, branches
from vllm_specrollout.cluster.messages import Sampling
from vllm_specrollout.config.checks import check_range
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import MOST_NODES, IntArray

PassTime = Callable[[int, int], float]
"""Requests, and rows beside each one's first in all -> milliseconds of a pass."""
_TARGETS = 1  # the token that the target samples, at any position; others are drafts that it does not
_LONG = 1 << 30
ANEW = 0.35
"""What a pass takes longer, as a share, where a request begins in it: measured with one of a batch, 0.2 to 0.5."""


@dataclass(frozen=True, slots=True)
class Match:
    """Which of a drafter's choices the target's tokens are.

    Misses come in clusters: with ranks in their order a chain of 8 holds more often than shares alone would say.

    Raises:
        ConfigError: no ranks, or one below 0.
    """

    # [positions] 0: the first choice; from `fan_out` on: none of them. In the tokens' order, if that is known
    ranks: IntArray

    def __post_init__(self) -> None:
        if not len(self.ranks) or int(self.ranks.min()) < 0:
            raise ConfigError(f"{len(self.ranks)} ranks are given, the least 0", "give one or more, each 0 or above")

    @classmethod
    def of_shares(cls, among: Sequence[float], rng: np.random.Generator, count: int = 1 << 14) -> Match:
        """Drawn, without clusters.

        Args:
            among: [F] share of positions at which the token is among the first 1, 2, ... choices.

        Raises:
            ConfigError: shares that are none, or that fall.
        """
        for share in among:
            check_range("match rates", share, 0.0, 1.0)
        if not among or list(among) != sorted(among):
            raise ConfigError(f"match rates are {list(among)}", "give rising shares, of 1, 2, ... choices")
        return cls(np.searchsorted(among, rng.random(count), side="right").astype(np.int32))

    def among(self, count: int) -> float:
        """Share of positions at which the token is one of the first `count` choices."""
        return float((self.ranks < count).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is rehearsed."""

    # of the target on its own devices, while the drafter works: requests, draft rows -> ms
    verify_ms: PassTime
    # of the drafter: requests of the target that are drafted for, and branches beside them in all -> ms
    draft_ms: PassTime
    match: Match
    batch: int = 1
    window: int = 4
    fan_out: int = 2
    # nodes and levels of a request that are verified, at most
    most_drafts: int = 16
    most_depth: int = MOST_NODES
    # requests of the drafter for one of the target; None: by the batch, as a drafter has it
    branches: int | None = None
    anew: float = ANEW


@dataclass(frozen=True, slots=True)
class Yield:
    """What came of it."""

    # of each request, in the mean: tokens and drafts of a step
    tokens_per_step: float
    drafts_per_step: float
    ms_per_step: float
    passes_per_step: float

    @property
    def rate(self) -> float:
        """Tokens per millisecond of a request."""
        return self.tokens_per_step / self.ms_per_step


@dataclass(slots=True)
class _Request:
    line: Line
    # [fan_out] what the drafter thinks of its choices: how often they hold
    log_q: Sequence[float]
    # where among the known ranks its own begin
    first_rank: int
    num_tokens: int = 1


class Rehearsal:
    """One setting, over as many steps as asked for.

    Args:
        rng: draws where each request begins among the known ranks.
    """

    def __init__(self, setting: Setting, rng: np.random.Generator) -> None:
        self._setting, self._rng, self._survival, self._noise = setting, rng, Survival(), NoiseTrial()
        self._requests = [self._begun(place) for place in range(setting.batch)]
        self._branches = setting.branches or branches(setting.batch)
        self._received = Received()
        for place in range(setting.batch):
            self._received.open(1 + place, 0)
        self._handles = np.arange(1, 1 + setting.batch, dtype=np.int64)
        # verdicts that the drafter has not read, and its pass in progress: when it ends, and who is in it
        self._told: deque[tuple[_Request, int]] = deque()
        self._ends_at: float | None = None
        self._drawing: list[tuple[_Request, str]] = []
        self._passes = 0

    def run(self, steps: int) -> Yield:
        """Steps of the verifier, one behind another."""
        now = tokens = drafts = 0.0
        for _ in range(steps):
            self._draft_until(now)
            rows, accepted = self._fitting()
            # told before the step, as in an engine
            self._told += [(request, request.num_tokens) for request in self._requests]
            end = now + self._setting.verify_ms(self._setting.batch, rows)
            self._draft_until(end, now)
            for request, count in zip(self._requests, accepted, strict=True):
                request.num_tokens += 1 + count
                tokens += 1 + count
            now, drafts = end, drafts + rows
        each = self._setting.batch * steps
        return Yield(tokens / each, drafts / each, now / steps, self._passes / steps)

    # --- the verifier ------------------------------------------------------------------------------------------------

    def _fitting(self) -> tuple[int, list[int]]:
        """Drafts in all that are verified, and of each request those that hold."""
        setting, size = self._setting, self._setting.batch
        texts = [np.full(request.num_tokens, _TARGETS, np.int32) for request in self._requests]
        most, depth = np.full(size, setting.most_drafts, np.int32), np.full(size, setting.most_depth, np.int32)
        columns = self._received.fit(self._handles, texts, most, depth, np.zeros(size, np.bool_))
        starts, tokens, parents = (column.tolist() for column in columns[:3])
        accepted = []
        for begin, end in itertools.pairwise(starts):
            at = count = -1
            for node in range(end - begin):
                if parents[begin + node] == at and tokens[begin + node] == _TARGETS:
                    at, count = node, count + 1
            accepted.append(count + 1)
        return starts[-1], accepted

    # --- the drafter -------------------------------------------------------------------------------------------------

    def _draft_until(self, end: float, now: float = 0.0) -> None:
        """Passes that end before `end`; the next one is left in progress."""
        while True:
            if self._ends_at is None:
                self._read()
                self._begin(now)
                if self._ends_at is None:
                    return  # nothing to draft until it is told more
            if self._ends_at > end:
                return
            now, self._ends_at = self._ends_at, None
            self._end()

    def _read(self) -> None:
        while self._told:
            request, num_tokens = self._told.popleft()
            line, new = request.line, num_tokens - len(request.line.tokens)
            if new > 0:
                for name in line.take([_TARGETS] * new, self._setting.window):
                    line.end(name)

    def _begin(self, now: float) -> None:
        asked = sum(len(request.line.wanted(self._branches)) for request in self._requests)
        self._drawing = [(request, name) for request in self._requests for name in request.line.tips]
        if self._drawing:
            lines = sum(bool(request.line.tips) for request in self._requests)
            self._passes += 1
            ms = self._setting.draft_ms(lines, len(self._drawing) - lines)
            self._ends_at = now + ms * (1.0 + self._setting.anew * bool(asked))

    def _end(self) -> None:
        for request, name in self._drawing:
            tip = request.line.tips[name]
            tokens = self._choices(request, tip)
            if not request.line.grow(name, tokens, request.log_q, tokens[0]):
                request.line.end(name)
        for place, request in enumerate(self._requests):
            if (tree := request.line.due()) is not None:
                self._received.put(
                    self._handles[place : place + 1].tobytes(),
                    np.array([tree.position], np.int32).tobytes(),
                    np.array([0, len(tree.token_ids)], np.int32).tobytes(),
                    tree.token_ids.tobytes(),
                    tree.parents.tobytes(),
                    tree.ranks.astype(np.uint8).tobytes(),
                    tree.log_q.tobytes(),
                    _LONG,
                )
        self._drawing = []

    def _choices(self, request: _Request, tip: Node) -> list[int]:
        """What the drafter has behind a node: the target's token has the rank drawn for its place, if any."""
        ranks, width = self._setting.match.ranks, self._setting.fan_out
        rank = int(ranks[(request.first_rank + tip.place) % len(ranks)]) if _is_on_path(tip) else width
        return [_TARGETS if i == rank else _TARGETS + 1 + i for i in range(width)]

    def _begun(self, place: int) -> _Request:
        setting = self._setting
        among = [setting.match.among(count) for count in range(setting.fan_out + 1)]
        log_q = [math.log(max(after - before, 1e-3)) for before, after in itertools.pairwise(among)]
        line = Line(
            str(place),
            [_TARGETS],
            Sampling(0.0),
            prompt_tokens=1,
            max_tokens=_LONG,
            most_tokens=_LONG,
            window=setting.window,
            survival=self._survival,
            noise=self._noise,
        )
        return _Request(line, log_q, int(self._rng.integers(len(setting.match.ranks))))


def _is_on_path(node: Node | None) -> bool:
    """Whether all tokens down to here are the target's."""
    while node is not None and node.parent is not None:
        if node.token != _TARGETS:
            return False
        node = node.parent
    return True


def coupled_tokens(match: Match, window: int, fan_out: int) -> float:
    """Tokens of a step that verifies w levels, each with its first choice and leaves beside it."""
    ranks, at, steps = match.ranks.tolist(), 0, 0
    while at < len(ranks):
        own = ranks[at : at + window]
        held = next((i for i, rank in enumerate(own) if rank), len(own))
        # a leaf that is hit yields the target's token behind it as well
        is_hit = held < len(own) and own[held] < fan_out
        at, steps = at + held + 1 + is_hit, steps + 1
    return at / steps


def rehearse(setting: Setting, rng: np.random.Generator, steps: int = 2000) -> Yield:
    """What a setting yields.

    Args:
        steps: of the verifier. With 2,000 a rate is within some 2 %.
    """
    if steps < 1:
        raise ConfigError(f"`steps` is {steps}", "choose 1 or more")
    return Rehearsal(setting, rng).run(steps)
