"""What is counted for the world outside: which metrics exist, and how a worker counts them. Pure.

A worker counts into plain numbers under text keys (`metric/label/label`), which ride on what goes to the frontend
anyway. Counting must cost a step microseconds: it sees arrays of all requests at once, and nothing per node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specrollout.drafters.base import Drafter
from vllm_specrollout.guard import Guard
from vllm_specrollout.history.vocabulary import ANY_TOKEN
from vllm_specrollout.policies.budget import Policy
from vllm_specrollout.step import Speculation, Unite
from vllm_specrollout.types import Choice, Decision, DraftTree, Feedback, RequestView, StepTiming

PREFIX = "vllm:spec_rollout_"
MARK = "spec_rollout/"
"""Before every key on the way to the frontend, where our keys lie among vLLM's own."""
FINE = 1000
"""Only whole numbers travel: fractions go as thousandths."""
_MOST_REASONS = 32
"""Different reasons a worker tells; any further one is `other`, so that labels stay few."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as /metrics shows it."""

    # behind PREFIX; counters end in `_total` there
    name: str
    kind: str
    help: str
    # beside model_name and engine
    labels: tuple[str, ...] = ()
    # upper bounds of a histogram
    buckets: tuple[float, ...] = ()
    # what a number that travels is divided by
    scale: int = 1


METRICS = (
    Metric("drafted_nodes", "counter", "Draft nodes that drafters proposed, by drafter.", ("source",)),
    Metric("verified_nodes", "counter", "Draft nodes sent to the target, by drafter.", ("source",)),
    Metric("accepted_nodes", "counter", "Draft nodes that the target accepted, by drafter.", ("source",)),
    Metric(
        "tree_nodes", "histogram", "Nodes verified per request and step with a draft.", (), (1, 2, 4, 8, 16, 32, 64)
    ),
    Metric("decisions", "counter", "Steps the budget decided on, by what it chose and why.", ("choice", "reason")),
    Metric("switches", "counter", "Times that drafting was switched, by what to and why.", ("to", "reason")),
    Metric("is_on", "gauge", "Whether the budget drafts at present: 1 or 0."),
    Metric("windows", "counter", "Requests that drafters were asked for, summed over steps."),
    Metric("window_tokens", "counter", "How many tokens ahead those requests could be drafted for, summed likewise."),
    Metric("budget_nodes", "gauge", "Draft nodes chosen for the next step, all requests together."),
    Metric(
        "cost_error",
        "histogram",
        "|predicted - measured| / measured time of decode steps whose time was predicted.",
        (),
        (0.01, 0.02, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0),
        FINE,
    ),
    Metric("expected_tokens", "counter", "Tokens that drafts were expected to add.", (), (), FINE),
    Metric("gained_tokens", "counter", "Tokens that drafts added in the steps of which some were expected."),
    Metric("failures", "counter", "Failures that cost drafts and nothing else, by what failed.", ("part",)),
)


class Meter:
    """Counts since the last `take`.

    A step's choice is known when it is prepared, what became of its drafts when it settles, and its time together with
    those (`timing_lag` 0) or one settlement later (1).
    """

    def __init__(self, sources: Sequence[str], timing_lag: int) -> None:
        self._sources = tuple(sources)
        self._lag = timing_lag
        self._counts: dict[str, int] = {}
        # choices of the step that settles next, and of the one before, each with the nodes that were to be verified
        self._choices: list[tuple[Choice, int] | None] = [None, None]
        self._was_on: bool | None = None
        self._reasons: set[str] = set()

    def allowed(self, decisions: Sequence[Decision]) -> None:
        """How far ahead each request may be drafted for in the next step."""
        windows = [min(decision.max_depth, decision.max_nodes) for decision in decisions if decision.max_nodes]
        if windows:
            self._add("windows", len(windows))
            self._add("window_tokens", sum(windows))

    def drafted(self, trees: Sequence[DraftTree]) -> None:
        """What drafters proposed for the next step."""
        self._by_source("drafted_nodes", [tree.source for tree in trees if tree.size])

    def chose(self, choice: Choice | None, nodes: int) -> None:
        """What the budget made of it; `nodes` of all requests together go to the target."""
        self._choices[0] = None if choice is None else (choice, nodes)
        if choice is not None:
            self._decided(choice, nodes)

    def rested(self, choice: Choice | None) -> None:
        """The next step goes without drafts, and nobody was asked; a step with drafts may still be in flight."""
        if choice is not None:
            self._choices[0] = self._choices[0] or (choice, 0)
            self._decided(choice, 0)

    def _decided(self, choice: Choice, nodes: int) -> None:
        reason = self._reason(choice.reason)
        what = "on" if choice.is_on else "off"
        self._add(f"decisions/{what}/{reason}", 1)
        if self._was_on is not None and self._was_on != choice.is_on:
            self._add(f"switches/{what}/{reason}", 1)
        self._was_on = choice.is_on
        self._counts["is_on"] = int(choice.is_on)
        self._counts["budget_nodes"] = nodes

    def settled(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        """What became of a step's drafts, and what a step cost."""
        accepted = sum(item.accepted for item in feedback)
        if feedback:
            sizes = [item.drafted for item in feedback]
            if len(self._sources) == 1:
                self._add(f"verified_nodes/{self._sources[0]}", sum(sizes))
                if accepted:
                    self._add(f"accepted_nodes/{self._sources[0]}", accepted)
            else:
                self._verified(feedback, sizes)
            for size, count in Counter(sizes).items():
                self._add(f"tree_nodes/{size}", count)
        if (own := self._choices[0]) is not None and own[0].expected_tokens > 0:
            self._add("expected_tokens", round(own[0].expected_tokens * FINE))
            self._add("gained_tokens", accepted)
        timed = self._choices[self._lag]
        if timing is not None and timed is not None:
            self._compare(*timed, timing)
        self._choices = [None, self._choices[0]]

    def failed(self, part: str) -> None:
        """A part of ours failed, and was contained."""
        self._add(f"failures/{part.replace('/', ' per ')}", 1)

    def take(self) -> dict[str, int]:
        """The counts so far, which are forgotten here."""
        counts, self._counts = self._counts, {}
        return counts

    def _compare(self, choice: Choice, nodes: int, timing: StepTiming) -> None:
        # a step that the scheduler cut, or that computed a prompt too, is not the one that was predicted
        if choice.expected_ms > 0 and timing.is_decode_only and timing.nodes == nodes and timing.step_ms > 0:
            error = abs(choice.expected_ms - timing.step_ms) / timing.step_ms
            self._add(f"cost_error/{round(error * FINE)}", 1)

    def _verified(self, feedback: Sequence[Feedback], sizes: list[int]) -> None:
        """Verified and accepted nodes by source, all requests in one go."""
        source = np.concatenate([item.source for item in feedback])
        start = np.cumsum(sizes) - sizes
        nodes = np.concatenate([item.accepted_nodes for item in feedback])
        nodes = nodes + np.repeat(start, [item.accepted for item in feedback])
        self._by_source("verified_nodes", [source])
        self._by_source("accepted_nodes", [source[nodes]])

    def _by_source(self, metric: str, sources: list[Any]) -> None:
        if not sources:
            return
        if len(self._sources) == 1:
            self._add(f"{metric}/{self._sources[0]}", sum(map(len, sources)))
            return
        joined = sources[0] if len(sources) == 1 else np.concatenate(sources)
        for source, count in enumerate(np.bincount(joined).tolist()):
            if count:
                name = self._sources[source] if source < len(self._sources) else "unknown"
                self._add(f"{metric}/{name}", count)

    def _reason(self, reason: str) -> str:
        if reason not in self._reasons:
            if len(self._reasons) >= _MOST_REASONS:
                return "other"
            self._reasons.add(reason)
        return reason.replace("/", " per ") or "none"

    def _add(self, key: str, count: int) -> None:
        self._counts[key] = self._counts.get(key, 0) + count


class MeteredSpeculation(Speculation):
    """A speculation that is counted; whichever budget it is given later is counted too."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        policy: Policy,
        unite: Unite,
        meter: Meter,
        *,
        vocab_size: int = ANY_TOKEN,
        guard: Guard | None = None,
    ) -> None:
        super().__init__(drafters, policy, unite, vocab_size=vocab_size, guard=guard)
        self.meter = meter
        self.guard.listener = meter.failed

    def settle(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        with self._counting():
            self.meter.settled(feedback, timing)
        super().settle(feedback, timing)

    def rests(self, batch: int) -> bool:
        is_resting = super().rests(batch)
        if is_resting:
            with self._counting():
                self.meter.rested(self.policy.explain())
        return is_resting

    def prepare(self, views: Sequence[RequestView]) -> list[DraftTree]:
        trees = super().prepare(views)
        with self._counting():
            nodes = sum(tree.size for tree in trees)
            choice = self.policy.explain()
            if choice is not None and choice.nodes and not nodes:
                choice = None  # of an earlier step: nobody proposed anything, so the budget was not asked again
            self.meter.chose(choice, nodes)
        return trees

    def _united(self, proposals: Sequence[Sequence[DraftTree]], decisions: Sequence[Decision]) -> list[DraftTree]:
        trees = super()._united(proposals, decisions)
        with self._counting():
            self.meter.allowed(decisions)
            self.meter.drafted(trees)
        return trees

    def _counting(self) -> AbstractContextManager[None, bool]:
        return self.guard.over("counting", "metrics lack a step")


def marked(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts as they travel among others' keys."""
    return {MARK + key: count for key, count in counts.items()}


def take_marked(mixed: dict[str, int]) -> list[tuple[str, list[str], int]]:
    """(metric, its labels or its value, count) of ours; they are gone from the table afterwards."""
    found = []
    for key in [key for key in mixed if key.startswith(MARK)]:
        name, *rest = key[len(MARK) :].split("/")
        found.append((name, rest, mixed.pop(key)))
    return found
