"""Rehearsal of decoupled drafting: the real streams, with a clock and tokens that are drawn. Pure.

What belongs here: a verifier and a drafter as times and match rates, event by event. The streams are those of
stream.py, and what fits is said by received.py: so a rehearsal and an engine differ in their times and tokens alone.
The formulas of rates.py are of windows, without exits behind exits.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_specrollout.cluster.following import OwnPlan
from vllm_specrollout.cluster.messages import Drafts, Open, Pace, Verdict
from vllm_specrollout.cluster.rates import Mode
from vllm_specrollout.cluster.received import Fitting, Received
from vllm_specrollout.cluster.stream import Choices, Stream, Survival
from vllm_specrollout.config.checks import check_range
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import MOST_NODES, ROOT, IntArray

PassTime = Callable[[int, int], float]
"""Requests, and rows beside each one's first in all -> milliseconds of a pass."""
_TARGETS = 1  # the token that the target samples, at any position; others are drafts that it does not
_LONG = 1 << 30


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
    # of the drafter: streams, nodes that it looks at -> ms
    draft_ms: PassTime
    match: Match
    batch: int = 1
    window: int = 4
    fan_out: int = 2
    # nodes of a stream that are looked behind; nodes and levels of a request that are verified, at most
    most_nodes: int = 16
    most_drafts: int = 16
    most_depth: int = MOST_NODES
    # [batch] of each request, where they are not alike; empty: `match` is that of all
    matches: Sequence[Match] = ()
    # place of a request -> its own window and mode
    plans: Mapping[int, OwnPlan] = field(default_factory=dict)


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
    stream: Stream
    match: Match
    # [fan_out] what the drafter thinks of its choices: how often they hold
    log_q: Sequence[float]
    window: int
    pace: Pace
    # where among the known ranks its own begin
    first_rank: int
    received: Received = field(default_factory=Received)
    num_tokens: int = 1


class Rehearsal:
    """One setting, over as many steps as asked for.

    Args:
        rng: draws where each request begins among the known ranks.
    """

    def __init__(self, setting: Setting, rng: np.random.Generator) -> None:
        self._setting, self._rng, self._survival = setting, rng, Survival()
        self._requests = [self._begun(handle) for handle in range(setting.batch)]
        # verdicts that the drafter has not read, and its pass in progress: when it ends, and who is in it
        self._told: deque[tuple[int, Verdict]] = deque()
        self._ends_at: float | None = None
        self._looking: list[tuple[_Request, list[tuple[bool, int]]]] = []
        self._passes = 0

    def run(self, steps: int) -> Yield:
        """Steps of the verifier, one behind another."""
        now = tokens = drafts = 0.0
        for _ in range(steps):
            self._draft_until(now)
            found = [self._fitting(request) for request in self._requests]
            rows = sum(len(own.token_ids) for own in found if own is not None)
            # told before the step, as in an engine
            for handle, request in enumerate(self._requests):
                self._told.append((handle, self._verdict(request)))
            end = now + self._setting.verify_ms(self._setting.batch, rows)
            self._draft_until(end, now)
            for request, own in zip(self._requests, found, strict=True):
                got = 1 + (0 if own is None else self._accepted(request, own))
                request.num_tokens += got
                tokens += got
            now, drafts = end, drafts + rows
        each = self._setting.batch * steps
        return Yield(tokens / each, drafts / each, now / steps, self._passes / steps)

    # --- the verifier ------------------------------------------------------------------------------------------------

    def _fitting(self, request: _Request) -> Fitting | None:
        own = np.full(request.num_tokens, _TARGETS, dtype=np.int32)
        return request.received.fitting(own, self._setting.most_drafts, self._setting.most_depth, False)

    @staticmethod
    def _accepted(request: _Request, own: Fitting) -> int:
        at, count = ROOT, 0
        while True:
            rows = enumerate(zip(own.parents, own.token_ids, strict=True))
            found = next((node for node, row in rows if row == (at, _TARGETS)), None)
            if found is None:
                return count
            at, count = found, count + 1

    def _verdict(self, request: _Request) -> Verdict:
        new = request.num_tokens - len(request.stream.tokens)
        tokens = np.full(max(new, 0) + 1, _TARGETS, dtype=np.int32)[: request.num_tokens]
        setting, none = self._setting, np.zeros(0, np.int64)
        return Verdict(0, 0, request.num_tokens, tokens, none, 0, request.window, setting.fan_out, request.pace)

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
            handle, verdict = self._told.popleft()
            self._requests[handle].stream.take(verdict)

    def _begin(self, now: float) -> None:
        rows = 0
        for request in self._requests:
            if request.stream.may_draft:
                look = request.stream.look()
                on_path = [True]
                for parent, token in zip(look.parents, look.token_ids, strict=True):
                    on_path.append(on_path[parent + 1] and token == _TARGETS)
                self._looking.append((request, list(zip(on_path, look.depths, strict=True))))
                rows += len(look.token_ids)
        if self._looking:
            self._passes += 1
            self._ends_at = now + self._setting.draft_ms(len(self._looking), rows)

    def _end(self) -> None:
        for request, rows in self._looking:
            before = len(request.stream.tokens)
            request.stream.grow([self._choices(request, before + depth, is_on) for is_on, depth in rows])
            drafts: Drafts | None = request.stream.due()
            if drafts is not None:
                request.received.put(drafts)
        self._looking = []

    def _choices(self, request: _Request, position: int, is_on_path: bool) -> Choices:
        """What the drafter would have at a position: the target's token has the rank drawn for it, if any."""
        ranks, width = request.match.ranks, self._setting.fan_out
        rank = int(ranks[(request.first_rank + position) % len(ranks)]) if is_on_path else width
        tokens = [_TARGETS if i == rank else _TARGETS + 1 + i for i in range(width)]
        return Choices(tokens, request.log_q)

    def _begun(self, handle: int) -> _Request:
        setting, none = self._setting, np.zeros(0, np.int64)
        first = np.asarray([_TARGETS], np.int32)
        own = setting.plans.get(handle, OwnPlan(setting.window, Mode.DECOUPLED))
        pace = Pace.COUPLED if own.mode is Mode.COUPLED else Pace.DECOUPLED
        opened = Open(handle, 0, first, none, 0.0, 0, 1.0, 0.0, _LONG, own.window, setting.fan_out, pace)
        match = setting.matches[handle] if setting.matches else setting.match
        among = [match.among(count) for count in range(setting.fan_out + 1)]
        log_q = [math.log(max(after - before, 1e-3)) for before, after in itertools.pairwise(among)]
        first_rank = int(self._rng.integers(len(match.ranks)))
        stream = Stream(opened, _LONG, setting.most_nodes, self._survival)
        return _Request(stream, match, log_q, own.window, pace, first_rank)


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
