"""What `bench decoupled` estimates, and from what: times and match rates of earlier answers. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vllm_specrollout.cluster.rehearsal import Match, Setting, coupled_tokens, rehearse
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import MOST_NODES

from ..runner.rows import Pair

PLAIN, COUPLED, DECOUPLED = "plain", "coupled", "decoupled"
_STEPS = 2000  # of a rehearsal


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What estimates are made of: of one drafter, batch and window, on earlier answers.

    Times are in plain steps of stock vLLM, taken in the same minute: the host's speed drifts by more than what is
    compared.
    """

    # [2] without drafts, and of each node of a request: of the target on all cores; and on those that it keeps beside
    # the drafter, which works meanwhile
    verify: tuple[float, float]
    verify_beside: tuple[float, float]
    # a pass of the drafter between the target's
    draft: float
    # [2] one on cores of its own, and of each node that it looks at in a stream
    draft_beside: tuple[float, float]
    match: Match

    def as_dict(self) -> dict[str, Any]:
        """For a report."""
        shares = [self.match.among(count) for count in (1, 2, 4, 8)]
        return {**asdict(self), "match": {"positions": len(self.match.ranks), "among": shares}}


Points = dict[int, list[tuple[float, float]]]
"""Window -> nodes, and what they took, of stock's step."""


class Learned:
    """What estimates are made of, as it comes in, run by run.

    How much a node adds is learned of all windows together. What a step takes without any is each window's own: it was
    measured in the same minutes, and steps do not grow evenly where more rows fill another tile of a matrix product.
    For steps beside a drafter, how many times longer they take is each window's own.
    """

    def __init__(self, match: Match) -> None:
        self._match = match
        # nodes of a request in a run's steps
        self._steps: dict[str, Points] = {COUPLED: {}, DECOUPLED: {}}
        self._passes: dict[int, list[float]] = {}
        # nodes of a stream in a pass
        self._beats: Points = {}

    def add(self, window: int, pairs: Mapping[str, Pair], told: Mapping[str, Any]) -> None:
        plain_ms = statistics.fmean(pairs[COUPLED].stock.step_ms())
        for arm, pair in pairs.items():
            totals = pair.ours.totals
            assert totals is not None
            draft_ms = totals.draft_ms / totals.steps
            step_ms = statistics.fmean(pair.ours.step_ms()) - draft_ms
            points = self._steps[arm].setdefault(window, [])
            points.append((totals.drafted / totals.request_steps, step_ms / plain_ms))
            if arm == COUPLED:
                self._passes.setdefault(window, []).append(draft_ms / window / plain_ms)
        known = [beat for beat in told["beats"] if beat[1] > 0]
        beats = [(rows / streams, ms / passes / plain_ms) for ms, passes, streams, rows in known]
        if beats:
            self._beats.setdefault(window, []).extend(beats)

    def facts(self, window: int) -> Facts:
        """Raises: ConfigError: the runs were too short to tell."""
        if window not in self._beats:
            raise ConfigError("the drafter's process drafted next to nothing", "run more tokens, with `--max-tokens`")
        verify = line_through(self._steps[COUPLED], window, (0.0, 1.0))
        return Facts(
            verify=verify,
            verify_beside=slowed((1.0, verify[1]), self._steps[DECOUPLED][window]),
            draft=statistics.median(self._passes[window]),
            draft_beside=line_through(self._beats, window),
            match=self._match,
        )


def estimated(facts: Facts, batch: int, window: int, fan_out: int, seed: int) -> dict[str, float]:
    """Placement -> times plain decoding."""
    setting = Setting(
        verify_ms=lambda requests, rows: _at(facts.verify_beside, rows / requests),
        draft_ms=lambda streams, rows: _at(facts.draft_beside, rows / streams),
        match=facts.match,
        batch=batch,
        window=window,
        fan_out=fan_out,
        most_drafts=most_drafts(window),
        most_depth=window,
    )
    beside = rehearse(setting, np.random.default_rng(seed), _STEPS)
    steps = window * facts.draft + _at(facts.verify, most_drafts(window))
    return {PLAIN: 1.0, COUPLED: coupled_tokens(facts.match, window, 2) / steps, DECOUPLED: beside.rate}


def most_drafts(window: int) -> int:
    """Nodes of a request that are verified, either way: a model's comb has two choices at each level."""
    return min(2 * window, MOST_NODES)


def _at(line: tuple[float, float], nodes: float) -> float:
    return line[0] + line[1] * nodes


def slowed(line: tuple[float, float], points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """A line made so many times as steep and as high that it passes through the points' middle.

    Steps beside a drafter verify what has come, often about one node each. Points so close together tell no slope: in
    two settings one node seemed to take as long as a step, and estimates were twice what was measured. On fewer cores
    all parts of a step take longer, so one factor is learned, and the slope is that of steps on all cores.
    """
    times = statistics.median(time / _at(line, nodes) for nodes, time in points)
    return times * line[0], times * line[1]


def line_through(points: Points, window: int, *more: tuple[float, float]) -> tuple[float, float]:
    """Through a window's points, with the slope of all and some more.

    That is the median of the slopes between two of them (Theil and Sen), so a stall decides nothing. A node that seems
    to take less than nothing takes nothing.
    """
    nodes, times = np.asarray([*more, *(point for own in points.values() for point in own)], dtype=np.float64).T
    first, second = np.triu_indices(len(nodes), 1)
    apart = nodes[first] != nodes[second]
    slopes = (times[second] - times[first])[apart] / (nodes[second] - nodes[first])[apart]
    slope = max(float(np.median(slopes)), 0.0) if len(slopes) else 0.0
    return statistics.median(time - slope * count for count, time in points[window]), slope
