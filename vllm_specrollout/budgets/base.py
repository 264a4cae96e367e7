"""How much is drafted in the next step: the one Protocol of all budgets, the two that need no thought, and pauses.

What belongs here: what every budget answers. A budget is asked for limits before the drafters propose, and chooses
what is worth verifying afterwards. It never learns who watches it, and it keeps no clock: pauses are the speculator's,
by the one rule that is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from vllm_specrollout.trees.batch import merge_select
from vllm_specrollout.types import (
    DraftLimits,
    FinishedRequest,
    RequestBatch,
    StepPlan,
    StepRecord,
    StepTiming,
    TreeBatch,
    empty_trees,
)

FOR_GOOD = 1 << 30
"""Steps; more than any engine runs."""
PATIENCE = 4
"""Asked steps in a row that may fail to pay before the first pause."""
CHEAP = 0.02
"""A drafter that takes less than this share of a plain step is asked whatever it yields."""
PRICE_MEMORY = 0.9
"""Weight left to what was known of a price, after each further time; before that, the mean of all times."""
FIRST_PAUSE, LONGEST_PAUSE = 4, 64
"""Steps without drafts; each further pause is twice as long, and one try lies between two."""


class Budget(Protocol):
    """Decides how much to draft. Pure: the same calls give the same answers."""

    backs_off: bool
    """Whether asking may be left for a while where nothing is proposed; what does not pay is said by each plan."""

    def steps_off(self, num_requests: int) -> int:
        """How many of the coming steps go without drafts whichever requests are in them; 0: look at the next one's.

        Asked once per engine step, before its requests are looked at, which costs time at large batches.
        """
        ...

    def limits(self, batch: RequestBatch) -> DraftLimits:
        """How much drafters are asked for."""
        ...

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        """What of the proposals is verified.

        Args:
            proposals: [P] one per drafter that was asked, each over all requests of the batch.
            limits: what `limits` answered for this batch.
            draft_ms: milliseconds that asking drafters takes in such steps.
        """
        ...

    def goodput(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> float:
        """Tokens per millisecond expected of the best of these proposals, or of a plain step; 0.0: it has no idea.

        Args:
            proposals, limits, batch, draft_ms: as in `choose`; a question only, nothing is planned.
        """
        ...

    def observe(self, record: StepRecord) -> None:
        """A step is over."""
        ...

    def finish(self, ending: FinishedRequest) -> None:
        """A request is over."""
        ...

    def seed(self, timings: Sequence[StepTiming]) -> None:
        """Start from steps that were measured earlier on such an engine."""
        ...


class BaseBudget:
    """What most budgets answer alike: they ask in every step, as the published systems do."""

    backs_off = False

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        """Args:
        max_nodes, max_depth: the engine's limits for one request.
        """
        self.max_nodes = max_nodes
        self.max_depth = max_depth

    def steps_off(self, num_requests: int) -> int:
        return 0

    def limits(self, batch: RequestBatch) -> DraftLimits:
        return bounded(batch, self.max_nodes, self.max_depth)

    def goodput(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> float:
        return 0.0

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""

    def finish(self, ending: FinishedRequest) -> None:
        """Nothing is kept per request."""

    def seed(self, timings: Sequence[StepTiming]) -> None:
        """Nothing to start from."""


class FixedBudget(BaseBudget):
    """Always verifies up to the configured size; for benchmarks, for recordings, and for those who know better."""

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        merged = merge_select(proposals, limits)
        return StepPlan(merged.trees, "fixed", pays=bool(merged.trees.num_nodes))


class OffBudget(BaseBudget):
    """Never drafts: plain decoding through the same engine, for comparison."""

    def __init__(self, max_nodes: int = 0, max_depth: int = 0) -> None:
        super().__init__(0, 0)

    def steps_off(self, num_requests: int) -> int:
        return FOR_GOOD

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        return StepPlan(empty_trees(batch.request_ids), "off", is_on=False, pays=False)


def bounded(
    batch: RequestBatch, max_nodes: int, max_depth: int, *, is_chain: bool = False, token_ms: float = 0.0
) -> DraftLimits:
    """The same limits for all requests, within what each of them allows."""
    depth = np.minimum(batch.max_depth, np.int32(max_depth))
    chain_only = np.ones_like(batch.is_chain) if is_chain else batch.is_chain
    # a request without levels has no nodes either; a chain has one on each level
    nodes = np.minimum(batch.max_nodes, np.int32(max_nodes if max_depth > 0 else 0))
    if chain_only.any():
        np.minimum(nodes, depth, out=nodes, where=chain_only)
    return DraftLimits(nodes, depth, chain_only, token_ms=token_ms)


def one_each(limits: DraftLimits, count: int) -> DraftLimits:
    """Raises: they are not one for each request."""
    if not len(limits.max_nodes) == len(limits.max_depth) == len(limits.is_chain) == count:
        raise ValueError(f"limits of {len(limits.max_nodes)} requests for {count}")
    return limits


class Backoff:
    """Pauses drafting: after some steps in a row that did not pay, for ever longer, until one pays."""

    def __init__(self) -> None:
        self._failed = 0
        self._pause = FIRST_PAUSE
        # the first step that may be asked again
        self._until = 0

    def is_paused(self, step: int) -> bool:
        """Whether this engine step goes without drafts."""
        return step < self._until

    def steps_left(self, step: int) -> int:
        """How many steps from this one on go without drafts."""
        return max(self._until - step, 0)

    def asked(self, step: int, paid: bool) -> None:
        """Drafters were asked in this step.

        Args:
            paid: whether that is expected to pay, the asking counted.
        """
        if paid:
            self._failed, self._pause = 0, FIRST_PAUSE
            return
        self._failed += 1
        if self._failed >= PATIENCE:
            self._until = step + 1 + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)


class Price:
    """Milliseconds that something takes, by the octave of how many requests it is done for.

    A model's pass takes most of its time whatever the number of requests, so neither its time per request nor its time
    alone holds for another batch.
    """

    def __init__(self) -> None:
        # octave -> milliseconds, and how often it was seen
        self._known: dict[int, tuple[float, int]] = {}

    def spent(self, num_requests: int, ms: float) -> None:
        octave = num_requests.bit_length()
        known, times = self._known.get(octave, (0.0, 0))
        weight = max(1.0 / (times + 1), 1.0 - PRICE_MEMORY)
        self._known[octave] = (known + weight * (ms - known), times + 1)

    def of(self, num_requests: int) -> float:
        """What it takes for so many requests; where that is not known, as for the nearest number that is. 0.0: nothing
        is known."""
        if not self._known:
            return 0.0
        octave = num_requests.bit_length()
        return self._known[min(self._known, key=lambda known: (abs(known - octave), known))][0]


class Worth:
    """What asking each drafter takes, and which drafters are not asked for a while since they yield less than that.

    A drafter that takes next to nothing is always asked.
    """

    def __init__(self) -> None:
        self._prices: dict[str, Price] = {}
        self._patience: dict[str, Backoff] = {}

    def spent(self, name: str, num_requests: int, ms: float) -> None:
        """Asking the drafter for so many requests took so many milliseconds."""
        self._prices.setdefault(name, Price()).spent(num_requests, ms)

    def asking_ms(self, num_requests: int, step: int) -> float:
        """Milliseconds that asking takes in this step."""
        return sum(price.of(num_requests) for name, price in self._prices.items() if not self.is_paused(name, step))

    def is_paused(self, name: str, step: int) -> bool:
        """Whether the drafter is not asked in this step."""
        return name in self._patience and self._patience[name].is_paused(step)

    def judge(
        self,
        plan: StepPlan,
        token_ms: float,
        num_requests: int,
        step: int,
        sources: Mapping[str, tuple[int, int]],
        without: Callable[[tuple[int, int], float], float],
    ) -> None:
        """Compare what the plan yields with what it would have yielded without each drafter: a node that another one
        proposed as well is no merit.

        Args:
            token_ms: as in `DraftLimits`.
            sources: drafter -> its first source, and how many it has.
            without: (one of `sources`' values, milliseconds of asking the others) -> goodput without those sources.
        """
        if plan.reach is None or token_ms <= 0.0 or plan.expected_ms <= 0.0:
            return
        goodput = (num_requests + plan.expected_tokens) / plan.expected_ms
        for name, span in sources.items():
            price = self._prices[name].of(num_requests) if name in self._prices else 0.0
            if price < CHEAP * token_ms * num_requests or self.is_paused(name, step):
                continue
            others_ms = self.asking_ms(num_requests, step) - price
            self._patience.setdefault(name, Backoff()).asked(step, goodput >= without(span, others_ms))

    def drop(self, name: str) -> None:
        """The drafter is switched off."""
        self._prices.pop(name, None)
        self._patience.pop(name, None)
