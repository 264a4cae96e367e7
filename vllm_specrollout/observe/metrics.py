"""What is counted for the world outside: which metrics exist, and how a worker counts them.

A worker counts into plain numbers under text keys (`metric/label/label`), which travel on what goes to the frontend
anyway. Counting must cost a step microseconds: it sees flat arrays of the whole batch, and nothing per request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specrollout import _core
from vllm_specrollout.observe.listener import NOTHING_TO_DRAFT, Listener
from vllm_specrollout.types import DraftLimits, RequestBatch, StepPlan, StepRecord, StepTiming, TreeBatch

PREFIX = "vllm:spec_rollout_"
MARK = "spec_rollout/"
"""Before every key on the way to the frontend, where our keys lie among vLLM's own."""
THOUSANDTHS = 1000
"""Only whole numbers travel: fractions go as so many thousandths."""
VERSION = "weights_version"
"""The label of series that are dropped once their weights are old."""
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
        "version_verified_nodes",
        "counter",
        "Draft nodes sent to the target, by drafter and by the target's weights; the newest 16 versions.",
        ("source", VERSION),
    ),
    Metric(
        "version_accepted_nodes",
        "counter",
        "Draft nodes that the target accepted, by drafter and by the target's weights; the newest 16 versions.",
        ("source", VERSION),
    ),
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
        THOUSANDTHS,
    ),
    Metric("expected_tokens", "counter", "Tokens that drafts were expected to add.", (), (), THOUSANDTHS),
    Metric("gained_tokens", "counter", "Tokens that drafts added in the steps of which some were expected."),
    Metric("decoupled_drafters", "gauge", "Drafters in processes of their own that are ready to draft."),
    Metric("decoupled_trees", "counter", "Draft trees that came from drafters in processes of their own."),
    Metric("decoupled_wasted_nodes", "counter", "Their nodes behind a first choice that the target did not take."),
    Metric("drafters_alive", "gauge", "Drafters that are asked; those that failed and wait to be tried again are not."),
    Metric("failures", "counter", "Failures that cost drafts and nothing else, by what failed.", ("part",)),
)


class Metrics(Listener):
    """Counts since the last `take`."""

    def __init__(self, sources: Sequence[str]) -> None:
        """Args:
        sources: names of the engine's drafters; a node's source is an index into them.
        """
        self._sources = tuple(sources)
        self._counts: dict[str, int] = {}
        self._was_on: bool | None = None
        self._reasons: set[str] = set()

    def planned(
        self,
        batch: RequestBatch,
        limits: DraftLimits,
        proposals: Sequence[TreeBatch],
        plan: StepPlan,
        draft_ms: float,
    ) -> None:
        self._add("windows", int(np.count_nonzero(limits.max_nodes)))
        self._add("window_tokens", int(np.minimum(limits.max_nodes, limits.max_depth).sum()))
        for proposal in proposals:
            self._by_source("drafted_nodes", np.bincount(proposal.source).tolist())
        if plan.reason != NOTHING_TO_DRAFT:
            self._decided(plan.is_on, plan.reason, plan.trees.num_nodes)

    def paused(self, num_requests: int, reason: str) -> None:
        self._decided(False, reason, 0)

    def stepped(self, record: StepRecord) -> None:
        trees, result = record.trees, record.result
        if trees.num_nodes:
            _, verified, accepted = _core.tally(
                trees.node_start, trees.parents, trees.log_q, trees.source, result.num_accepted, result.accepted
            )
            self._by_source("verified_nodes", verified.tolist())
            self._by_source("accepted_nodes", accepted.tolist())
            if record.batch is not None and record.batch.size:
                version = f"/{record.batch.views[0].weights_version}"
                self._by_source("version_verified_nodes", verified.tolist(), version)
                self._by_source("version_accepted_nodes", accepted.tolist(), version)
            for size, count in enumerate(np.bincount(trees.sizes).tolist()):
                if size:
                    self._add(f"tree_nodes/{size}", count)
        plan = record.plan
        if plan is None:
            return
        if (expected := plan.expected_tokens) > 0.0:
            self._add("expected_tokens", round(expected * THOUSANDTHS))
            self._add("gained_tokens", len(result.accepted))
        if record.timing is not None:
            self._compare(plan, record.timing)

    def failed(self, part: str) -> None:
        self._add(f"failures/{part.replace('/', ' per ')}", 1)

    def drafters_alive(self, count: int) -> None:
        self._counts["drafters_alive"] = count

    def elsewhere(self, alive: int, trees: int, wasted: int) -> None:
        """Of drafters in processes of their own: how many are ready, and what has come since this was told last."""
        self._counts["decoupled_drafters"] = alive
        self._add("decoupled_trees", trees)
        self._add("decoupled_wasted_nodes", wasted)

    def take(self) -> dict[str, int]:
        """The counts so far, which are forgotten here."""
        counts, self._counts = self._counts, {}
        return counts

    def _decided(self, is_on: bool, reason: str, nodes: int) -> None:
        label = self._label(reason)
        what = "on" if is_on else "off"
        self._add(f"decisions/{what}/{label}", 1)
        if self._was_on not in (None, is_on):
            self._add(f"switches/{what}/{label}", 1)
        self._was_on = is_on
        self._counts["is_on"] = int(is_on)
        self._counts["budget_nodes"] = nodes

    def _compare(self, plan: StepPlan, timing: StepTiming) -> None:
        # a step that the scheduler cut, or that computed a prompt too, is not the one that was predicted
        is_as_planned = timing.is_decode_only and timing.nodes == plan.trees.num_nodes
        if plan.expected_ms > 0.0 and timing.step_ms > 0.0 and is_as_planned:
            error = abs(plan.expected_ms - timing.step_ms) / timing.step_ms
            self._add(f"cost_error/{round(error * THOUSANDTHS)}", 1)

    def _by_source(self, metric: str, counts: Sequence[int], more: str = "") -> None:
        for source, count in enumerate(counts):
            if count:
                name = self._sources[source] if source < len(self._sources) else "unknown"
                self._add(f"{metric}/{name}{more}", count)

    def _label(self, reason: str) -> str:
        if reason not in self._reasons:
            if len(self._reasons) >= _MOST_REASONS:
                return "other"
            self._reasons.add(reason)
        return reason.replace("/", " per ") or "none"

    def _add(self, key: str, count: int) -> None:
        if count:
            self._counts[key] = self._counts.get(key, 0) + count


def encode(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts as they travel among others' keys."""
    return {MARK + key: count for key, count in counts.items()}


def decode(mixed: dict[str, int]) -> list[tuple[str, list[str], int]]:
    """(metric, its labels or its value, count) of ours; they are gone from the table afterwards."""
    found = []
    for key in [key for key in mixed if key.startswith(MARK)]:
        name, *labels = key[len(MARK) :].split("/")
        found.append((name, labels, mixed.pop(key)))
    return found
