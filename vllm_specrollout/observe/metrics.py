"""Metrics: names and help of Prometheus', the worker's counters, and the lines of its log that say what they bring.

A worker counts into plain numbers under text keys (`metric/label/label`), which travel on what goes to the frontend
anyway. Counting must cost a step microseconds: it sees flat arrays of the whole batch, and nothing per request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specrollout import _core
from vllm_specrollout.config import ALTERNATIVES
from vllm_specrollout.drafters.base import UNBOUNDED
from vllm_specrollout.observe.listener import NOTHING_TO_DRAFT, Listener
from vllm_specrollout.types import (
    SOURCES,
    Answer,
    DraftLimits,
    IntArray,
    RequestBatch,
    RequestView,
    StepPlan,
    StepRecord,
    TreeBatch,
    VerifyResult,
)

logger = logging.getLogger("vllm.specrollout")

PREFIX = "vllm:spec_rollout_"
MARK = "spec_rollout/"
"""Before every key on the way to the frontend, where our keys lie among vLLM's own."""
THOUSANDTHS = 1000
"""Only whole numbers travel: fractions go as so many thousandths."""
_MOST_REASONS = 32
"""Different reasons a worker tells; any further one is `other`, so that labels stay few."""
EVERY_S = 60.0
LEAST_S = 10.0
"""Of a rollout that is shorter nothing is said: a server's single requests would fill the log."""


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
    Metric("nodes", "counter", "Draft nodes that were drafted, verified, accepted, by drafter.", ("stage", "source")),
    Metric(
        "context_nodes",
        "counter",
        "Draft nodes that were verified and accepted, by the least tokens of prompt and answer before them.",
        ("stage", "context"),
    ),
    Metric("decisions", "counter", "Steps the budget decided on, by what it chose and why.", ("choice", "reason")),
    Metric("is_on", "gauge", "Whether the budget drafts at present: 1 or 0."),
    Metric(
        "cost_error",
        "histogram",
        "|predicted - measured| / measured time of decode steps whose time was predicted.",
        (),
        (0.01, 0.02, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0),
        THOUSANDTHS,
    ),
    Metric("request_steps", "counter", "Decode steps of all requests together, with drafts or without."),
    Metric("output_tokens", "counter", "Tokens that these steps yielded."),
    Metric(
        "decode_seconds",
        "counter",
        "Seconds that these steps took, and that plain ones would have for the same tokens, by the budget's estimate.",
        ("kind",),
        (),
        THOUSANDTHS * THOUSANDTHS,
    ),
    Metric(
        "decoupled",
        "counter",
        "Of drafters in processes of their own: draft trees, and nodes behind a first choice that was not taken.",
        ("kind",),
    ),
    Metric(
        "drafters_alive",
        "gauge",
        "Drafters that are asked, in the worker, and those ready in processes of their own.",
        ("where",),
    ),
    Metric(
        "most_tokens",
        "gauge",
        "Tokens of a request beyond which a drafter drafts for nobody, as its context is shorter than the target's.",
        ("source",),
    ),
    Metric(
        "accepted_nothing",
        "gauge",
        "1: of the drafter's nodes (`all`: of anybody's) none was accepted since the target's last weights.",
        ("source",),
    ),
    Metric("head", "gauge", "Number of the head that drafts, and how often a new one was worse.", ("kind",)),
    Metric("self_checks", "counter", "Parts of the engine's check of itself at its start.", ("part", "result")),
    Metric("withheld_tokens", "counter", "Tokens of withheld verdicts, beside those of plain decoding.", ("result",)),
    Metric(
        "head_match_rate",
        "gauge",
        "Match rate of a head that learns: when it began to draft, and now.",
        ("when",),
        (),
        THOUSANDTHS,
    ),
    Metric("trainer_state", "gauge", "1: what the trainer of the head does.", ("state",)),
    Metric("trainer_work", "gauge", "Rows that it has learned from, and seconds that it took.", ("unit",)),
    Metric("failures", "counter", "Failures that cost drafts and nothing else, by what failed.", ("part",)),
)


EVERY = 16
"""Steps without drafts after which their counts are told."""
CONTEXTS = (0, 1024, 4096, 16384, 65536)
"""Least tokens of the contexts that are told apart."""
_DRAFTED, _VERIFIED, _ACCEPTED, _OF_CONTEXTS = 0, 1, 2, 3
_NODES = ("nodes/drafted", "nodes/verified", "nodes/accepted", "context_nodes/verified", "context_nodes/accepted")
LEAST_NODES = 4096
"""Verified under the same weights: of fewer nothing is said, though none was accepted."""
ALL = "all"
_OF_TRAINER = ("head_match_rate/", "trainer_")
_WORK = {"trainer_rows": "trainer_work/rows", "trainer_seconds": "trainer_work/seconds"}


@dataclass(slots=True)
class Gain:
    """Of decode steps alone: prompts cost the same with drafts and without."""

    # steps of all requests, and what these got
    request_steps: int = 0
    output_tokens: int = 0
    # that the steps took; and that plain steps would have taken, where the budget knows
    spent_ms: float = 0.0
    plain_ms: float = 0.0
    is_known: bool = False

    def add(self, record: StepRecord) -> None:
        timing, plan = record.timing, record.plan
        if timing is None or not timing.is_decode_only or not timing.batch or timing.step_ms <= 0.0:
            return
        self.request_steps += timing.batch
        self.output_tokens += timing.tokens
        self.spent_ms += timing.step_ms
        plain = 0.0 if plan is None else plan.plain_ms
        # a step without drafts is a plain one
        self.is_known |= plain > 0.0
        self.plain_ms += plain * timing.tokens / timing.batch if timing.nodes and plain > 0.0 else timing.step_ms

    @property
    def tokens_per_step(self) -> float:
        """Of one request."""
        return self.output_tokens / max(self.request_steps, 1)

    @property
    def speedup(self) -> float:
        return self.plain_ms / self.spent_ms if self.spent_ms else 1.0


class Signs:
    """Signs of life: lines of the log that say what drafting brings, whatever vLLM's own statistics are set to.

    One line a minute while requests run, and one when the last of them is over. What it says is of the time since the
    line before it; tokens per step are of all steps, those without drafts among them.

    Args:
        say: takes the line.
        clock: seconds, from any zero.
    """

    def __init__(self, say: Callable[[str], None] = logger.info, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._running: set[str] = set()
        self._gain, self._drafted, self._accepted = Gain(), 0, 0
        # when the first step was over that the next line is about
        self._since: float | None = None

    def admitted(self, view: RequestView) -> None:
        self._running.add(view.request_id)

    def finished(self, ending: Answer) -> None:
        self._running.discard(ending.request_id)
        if not self._running and self._since is not None and self._clock() - self._since >= LEAST_S:
            self._tell("rollout over")

    def stepped(self, record: StepRecord) -> None:
        self._gain.add(record)
        self._drafted += record.trees.num_nodes
        self._accepted += len(record.result.accepted)
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since >= EVERY_S:
            self._tell(f"{len(self._running)} requests run")

    def _tell(self, what: str) -> None:
        gain, share = self._gain, self._accepted / max(self._drafted, 1)
        if gain.request_steps:
            times = f", {gain.speedup:.2f} times plain decoding by estimate" if gain.is_known else ""
            drafts = f"{share:.0%} of {self._drafted} draft tokens accepted" if self._drafted else "no drafts"
            self._say(f"Spec rollout: {what}; {gain.tokens_per_step:.2f} tokens a step, {drafts}{times}")
        self._gain, self._drafted, self._accepted, self._since = Gain(), 0, 0, None


class Metrics(Listener):
    """Counts since the last `take`: in arrays while steps go on, with names once they are read."""

    def __init__(self, sources: Sequence[str], signs: Signs | None = None) -> None:
        """Args:
        sources: names of the engine's drafters; a node's source is an index into them.
        """
        self._signs = Signs() if signs is None else signs
        self._sources = tuple(sources)
        # [_NODES, SOURCES] nodes, by source and then by context
        self._nodes = np.zeros((len(_NODES), SOURCES), np.int64)
        # those that have got their names, since the engine began
        self._named = np.zeros_like(self._nodes)
        # [SOURCES] nodes whose parents were accepted, since the engine began
        self._reached = np.zeros(SOURCES)
        self.trainer: dict[str, int] = {}
        """What the trainer of the head told last."""
        self._version = 0
        # under these weights: [SOURCES + 1] nodes that were verified, and those accepted, by source and of all; and
        # names of those of whom none was, though they had enough
        self._since = np.zeros((2, SOURCES + 1), np.int64)
        self._unmet: set[str] = set()
        self._gain = Gain()
        self.total = Gain()
        """Since the engine's start, or since somebody put another one here."""
        # those with labels that are not known before, and gauges
        self._counts: dict[str, int] = {}
        self._reasons: set[str] = set()
        # what was decided last, and how many times since that has got its name
        self._decision: tuple[bool, str] | None = None
        self._times = 0
        # steps since the last `take`
        self._untold = 0

    def admitted(self, view: RequestView) -> None:
        self._signs.admitted(view)

    def finished(self, ending: Answer) -> None:
        self._signs.finished(ending)

    def planned(
        self,
        batch: RequestBatch,
        limits: DraftLimits,
        proposals: Sequence[TreeBatch],
        plan: StepPlan,
        draft_ms: float,
    ) -> None:
        for proposal in proposals:
            self._nodes[_DRAFTED] += np.bincount(proposal.source, minlength=SOURCES)
        if plan.reason != NOTHING_TO_DRAFT:
            self._decided(plan.is_on, plan.reason)

    def paused(self, num_requests: int, reason: str) -> None:
        self._decided(False, reason)

    def stepped(self, record: StepRecord) -> None:
        trees, result = record.trees, record.result
        self._untold += 1
        if trees.num_nodes:
            self._untold = EVERY
            counts, verified, accepted = _core.tally(
                trees.node_start, trees.parents, trees.log_q, trees.source, result.num_accepted, result.accepted
            )
            self._reached += counts[0].sum(axis=1)
            self._nodes[_VERIFIED] += verified
            self._nodes[_ACCEPTED] += accepted
            if record.batch is not None and record.batch.size:
                version = record.batch.views[0].weights_version
                if version != self._version:
                    self._version, self._since[:] = version, 0
                self._nodes[_OF_CONTEXTS:, : len(CONTEXTS)] += by_context(record.batch, trees, result)
            self._since += ((*verified, verified.sum()), (*accepted, accepted.sum()))
            self._watch()
        self._gain.add(record)
        self.total.add(record)
        self._signs.stepped(record)
        plan, timing = record.plan, record.timing
        # a step that the scheduler cut, or that computed a prompt too, is not the one that was predicted
        if (
            (plan is not None and timing is not None)
            and (plan.expected_ms > 0.0 and timing.step_ms > 0.0)
            and (timing.is_decode_only and timing.nodes == plan.trees.num_nodes)
        ):
            self._add(f"cost_error/{round(abs(plan.expected_ms / timing.step_ms - 1.0) * THOUSANDTHS)}", 1)

    def compared(self, checked: int, differing: int) -> None:
        self._add("withheld_tokens/same", checked - differing)
        self._add("withheld_tokens/differing", differing)

    def failed(self, part: str) -> None:
        self._add(f"failures/{part.replace('/', ' per ')}", 1)

    def checked(self, part: str, result: str) -> None:
        self._add(f"self_checks/{part}/{result}", 1)

    def drafters_alive(self, count: int) -> None:
        self._counts["drafters_alive/worker"] = count

    def bounded(self, name: str, most: int) -> None:
        """A drafter drafts for no request that is longer."""
        if most < UNBOUNDED:
            self._counts[f"most_tokens/{name}"] = most

    def head(self, number: int, went_back: int) -> None:
        """Another head drafts."""
        self._counts.update({"head/number": number, "head/went_back": went_back})

    def elsewhere(self, alive: int, trees: int, wasted: int) -> None:
        """Of drafters in processes of their own: how many are ready, and what has come since this was told last."""
        self._counts["drafters_alive/process"] = alive
        self._add("decoupled/trees", trees)
        self._add("decoupled/wasted_nodes", wasted)

    def nodes_of(self, sources: Collection[str]) -> tuple[int, int]:
        """Nodes of these drafters that were verified, and that were accepted, since the engine began."""
        own = [i for i, name in enumerate(self._sources) if name in sources]
        verified, accepted = (self._named + self._nodes)[[_VERIFIED, _ACCEPTED]][:, own].sum(axis=1).tolist()
        return verified, accepted

    def met_of(self, sources: Collection[str]) -> tuple[int, int]:
        """Positions for which these drafters had a node behind what was accepted, and where one of theirs was met."""
        own = [i for i, name in enumerate(self._sources) if name in sources]
        return round(self._reached[own].sum()), self.nodes_of(sources)[1]

    def told(self, trainer: Mapping[str, int]) -> None:
        """What the trainer of a head does; of what it tells, gauges are shown."""
        self.trainer = dict(trainer)
        self._counts.update((_WORK.get(name, name), n) for name, n in trainer.items() if name.startswith(_OF_TRAINER))

    def take_if_due(self) -> dict[str, int]:
        """`take`, behind a step with drafts and behind every 16th of those without: telling takes as long as a
        twentieth of a small model's step. Empty: it is not due."""
        return self.take() if self._untold >= EVERY else {}

    def take(self) -> dict[str, int]:
        """The counts so far, which are forgotten here."""
        self._untold = 0
        self._name_decisions()
        for row, i in np.argwhere(self._nodes).tolist():
            names = self._sources if row < _OF_CONTEXTS else CONTEXTS
            self._add(f"{_NODES[row]}/{names[i] if i < len(names) else 'unknown'}", int(self._nodes[row, i]))
        self._named += self._nodes
        self._nodes[:] = 0
        counts, gain, self._counts, self._gain = self._counts, self._gain, {}, Gain()
        if gain.request_steps:
            counts |= {
                "request_steps": gain.request_steps,
                "output_tokens": gain.output_tokens,
                "decode_seconds/taken": round(gain.spent_ms * THOUSANDTHS),
                "decode_seconds/plain": round(gain.plain_ms * THOUSANDTHS),
            }
        return counts

    def _watch(self) -> None:
        """Say of whom nothing was accepted under these weights: once, until something is, or others come."""
        silent = (self._since[0] >= LEAST_NODES) & (self._since[1] == 0)
        if not silent.any() and not self._unmet:
            return
        # a drafter's alternatives are its own: where its first choice always holds, they never do
        names, met = ({self._drafter(i) for i in np.flatnonzero(own).tolist()} for own in (silent, self._since[1]))
        names -= met
        self._counts.update({f"accepted_nothing/{name}": int(name in names) for name in names ^ self._unmet})
        if new := sorted(names - self._unmet):
            logger.warning(
                "Spec rollout: none of %d draft tokens was accepted since weights version %d, by drafter: %s; drafts"
                " may be of another policy",
                *(LEAST_NODES, self._version, ", ".join(new)),
            )  # fmt: skip
        self._unmet = names

    def _drafter(self, source: int) -> str:
        name = self._sources[source] if source < len(self._sources) else ALL if source == SOURCES else "unknown"
        return name.removesuffix(ALTERNATIVES)

    def _decided(self, is_on: bool, reason: str) -> None:
        decision = (is_on, reason)
        if decision != self._decision:
            self._name_decisions()
            self._decision = decision
        self._times += 1

    def _name_decisions(self) -> None:
        """What was decided since the last name was given is counted under its own."""
        times, self._times = self._times, 0
        if self._decision is None or not times:
            return
        is_on, reason = self._decision
        if reason not in self._reasons:
            if len(self._reasons) < _MOST_REASONS:
                self._reasons.add(reason)
            else:
                reason = "other"
        label, what = reason.replace("/", " per ") or "none", "on" if is_on else "off"
        self._add(f"decisions/{what}/{label}", times)
        self._counts["is_on"] = int(is_on)

    def _add(self, key: str, count: int) -> None:
        if count:
            self._counts[key] = self._counts.get(key, 0) + count


def by_context(batch: RequestBatch, trees: TreeBatch, result: VerifyResult) -> list[npt.NDArray[np.int64]]:
    """[2, CONTEXTS] nodes verified and accepted, by the tokens that their requests had when they were drafted."""
    tokens: IntArray | list[int] = batch.num_tokens
    if batch.request_ids != trees.request_ids:
        known = dict(zip(batch.request_ids, batch.num_tokens.tolist(), strict=True))
        tokens = [known.get(name, 0) for name in trees.request_ids]
    at = np.searchsorted(CONTEXTS, tokens, "right") - 1
    return [np.bincount(np.repeat(at, n), minlength=len(CONTEXTS)) for n in (trees.sizes, result.num_accepted)]


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
