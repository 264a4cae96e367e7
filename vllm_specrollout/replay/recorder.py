"""Writes down the steps of an engine, so that any budget can be replayed on them.

What belongs here: how events become the records of a trace (replay/records.py). A recorded engine drafts as any other
does, so a trace holds what its drafters were asked for. To record wide trees, run with the budget `fixed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from vllm_specrollout.budgets.step_cost import Timing
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.replay.files import Sink
from vllm_specrollout.replay.records import OPEN, Arrival, Candidates, End, Header, Step, Verified, round_ms
from vllm_specrollout.trees.batch import merge_select
from vllm_specrollout.types import (
    MOST_NODES,
    Answer,
    DraftLimits,
    RequestBatch,
    RequestView,
    StepPlan,
    StepRecord,
    StepTiming,
    TreeBatch,
)

_MOST_OPEN = 64
"""Decisions without a record that are remembered; more than any engine has steps in flight."""


@dataclass(frozen=True, slots=True)
class _Drafts:
    """What drafters proposed for a step that is not over."""

    # milliseconds since the recording began, when drafters were asked
    at_ms: float
    ask_ms: float
    reason: str
    views: int
    candidates: tuple[Candidates, ...]


class Recorder(Listener):
    """Writes a trace. A step's drafts stand in the record of the step before it, as drafters were asked at its end."""

    def __init__(self, header: Header, sink: Sink, clock: Callable[[], float]) -> None:
        """Args:
        clock: seconds, from any zero.
        """
        self._max_num_seqs = header.max_num_seqs
        self._lag = header.lag
        self._sink = sink
        self._clock = clock
        self._begin = clock()
        # request id -> its number; that of those which ended lately, since a record may come after the end; and the
        # tokens that each running request has generated so far
        self._numbers: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self._answers: dict[str, list[int]] = {}
        self._num_requests = 0
        # decisions on steps that are not over, in their order: a plan with its drafts, or a pause's reason. One may
        # never become a step, for instance when all its requests have ended
        self._decided: deque[tuple[StepPlan, _Drafts] | tuple[None, str]] = deque(maxlen=_MOST_OPEN)
        # of the last step that is over, which is written when the drafts that follow it are known
        self._step: Step | None = None
        self._num_steps = 0
        # of the step before, where traces tell of it one record late
        self._late: StepTiming | None = None
        # when the coming step was last decided on
        self._decided_ms: float | None = None
        self._ready_ms = 0.0
        sink.write(header)

    def admitted(self, view: RequestView) -> None:
        self._see(view)

    def planned(
        self,
        batch: RequestBatch,
        limits: DraftLimits,
        proposals: Sequence[TreeBatch],
        plan: StepPlan,
        draft_ms: float,
    ) -> None:
        at_ms = self._decided_ms = self._now_ms() - draft_ms
        places = [self._see(view) for view in batch.views]
        found: tuple[Candidates, ...] = ()
        if proposals:
            # all that was proposed, drafters at their word: a replayed budget may choose otherwise
            most = np.where(limits.max_nodes > 0, MOST_NODES, 0).astype(np.int32)
            trees = merge_select(proposals, replace(limits, max_nodes=most)).trees
            found = tuple(
                Candidates.of(number, position, trees.tree(i))
                for i, ((number, position), size) in enumerate(zip(places, trees.sizes.tolist(), strict=True))
                if size
            )
        # drafters that were not even asked say so
        reason = plan.reason if plan.is_on or plan.reason == "off" else f"off: {plan.reason}"
        self._decided.append((plan, _Drafts(at_ms, draft_ms, reason, batch.size, found)))

    def paused(self, num_requests: int, reason: str) -> None:
        self._decided_ms = self._now_ms()
        self._decided.append((None, reason))

    def stepped(self, record: StepRecord) -> None:
        found = next((one for one in self._decided if one[0] is record.plan), None)
        if found is not None and found[0] is not None:
            # what was decided before it never became a step
            while self._decided.popleft() is not found:
                pass
            self._put(found[1])
        elif found is not None and self._step is not None:
            self._decided.remove(found)
            self._step = msgspec.structs.replace(self._step, reason=found[1])
        before = self._step
        self._flush()
        # the V1 runner decides on the coming step as soon as it knows the verdicts, and tells of this one later
        decided_ms, self._decided_ms = self._decided_ms, None
        at_ms = self._now_ms() if decided_ms is None or not self._lag else decided_ms
        verified = [
            Verified(number, nodes, accepted)
            for request_id, (nodes, accepted) in _verified(record).items()
            if (number := self._numbers.get(request_id, self._ended.get(request_id))) is not None
        ]
        sources = tuple(np.bincount(record.trees.source).tolist()) if record.trees.num_nodes else ()
        self._open(at_ms, record.timing, tuple(verified), sources)
        timing = record.timing
        begin_ms = at_ms if self._lag else None if before is None else before.at_ms
        is_full = timing is None or timing.waiting > 0 or timing.batch >= self._max_num_seqs
        if begin_ms is not None and not is_full:
            # there was room, so who comes now did not exist when that step began
            self._ready_ms = begin_ms

    def finished(self, ending: Answer) -> None:
        number = self._numbers.pop(ending.request_id, None)
        self._answers.pop(ending.request_id, None)
        # a request that may not be drafted for is never seen before its end
        if number is None:
            return
        self._ended[ending.request_id] = number
        if len(self._ended) > 2 * self._max_num_seqs:  # as many as can end before the last record of one comes
            del self._ended[next(iter(self._ended))]
        self._sink.write(
            End(
                request=number,
                status=ending.status.value,
                token_ids=ending.token_ids.tolist(),
                weights_version=ending.weights_version,
            )
        )

    def closed(self) -> None:
        """Write what is known of answers without an end, and end the trace."""
        for one in self._decided:
            if one[0] is not None:
                self._put(one[1])
                self._flush()
        self._decided.clear()
        self._flush()
        for request_id, number in self._numbers.items():
            self._sink.write(End(request=number, status=OPEN, token_ids=self._answers[request_id]))
        self._numbers.clear()
        self._answers.clear()
        self._sink.close()

    def _now_ms(self) -> float:
        return (self._clock() - self._begin) * 1e3

    def _open(
        self,
        at_ms: float,
        timing: StepTiming | None,
        verified: tuple[Verified, ...] = (),
        sources: tuple[int, ...] = (),
    ) -> None:
        if self._lag:
            timing, self._late = self._late, timing
        cost = None if timing is None else Timing.of(timing)
        self._step = Step(at_ms=round_ms(at_ms), timing=cost, verified=verified, sources=sources)
        self._num_steps += 1

    def _put(self, drafts: _Drafts) -> None:
        """Drafters were asked at the end of the step before; nobody has told of that one if there is none."""
        if self._step is None:
            self._open(drafts.at_ms, None)
        assert self._step is not None
        found = {
            "ask_ms": round_ms(drafts.ask_ms),
            "views": drafts.views,
            "reason": drafts.reason,
            "candidates": drafts.candidates,
        }
        self._step = msgspec.structs.replace(self._step, **found)

    def _flush(self) -> None:
        if self._step is not None:
            self._sink.write(self._step)
            self._step = None

    def _see(self, view: RequestView) -> tuple[int, int]:
        """Number and position of a request; the tokens that are new since it was last seen are kept."""
        position = len(view.token_ids) - view.num_prompt_tokens
        number = self._numbers.get(view.request_id)
        if number is None:
            number = self._numbers[view.request_id] = self._num_requests
            self._num_requests += 1
            self._answers[view.request_id] = []
            arrival = Arrival(
                request=number,
                # the last one that is told of, or where that comes late, the one behind it
                step=max(self._num_steps - 1 + self._lag, 0),
                num_prompt_tokens=view.num_prompt_tokens,
                max_tokens=view.max_new_tokens + position,
                problem_id=view.problem_id,
                shape=view.shape,
                max_draft_tokens=view.max_draft_tokens,
                weights_version=view.weights_version,
                ready_ms=round_ms(self._ready_ms),
                ends=tuple(view.ends.tolist()),
            )
            self._sink.write(arrival)
        answer = self._answers[view.request_id]
        answer += view.token_ids[view.num_prompt_tokens + len(answer) :].tolist()
        return number, position


def _verified(record: StepRecord) -> dict[str, tuple[int, int]]:
    """Request id -> its draft nodes and how many of them were accepted; requests without a draft are left out."""
    trees = record.trees
    if not trees.num_nodes:
        return {}
    rows = zip(trees.request_ids, trees.sizes.tolist(), record.result.num_accepted.tolist(), strict=True)
    return {request_id: (nodes, accepted) for request_id, nodes, accepted in rows if nodes}
