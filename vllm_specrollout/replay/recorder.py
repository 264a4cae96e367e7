"""A policy that writes down what another one sees, so that any policy can be replayed on it.

Drafters are asked for as much as the engine's limits allow, since a replayed policy may want more than the recorded
one. The wrapped policy sees what it would have seen alone; only the milliseconds that larger proposals take are new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from vllm_specrollout.policies.budget import Policy, may_draft
from vllm_specrollout.replay.candidates import cut
from vllm_specrollout.replay.files import Sink
from vllm_specrollout.replay.records import OPEN, Arrival, Candidates, End, Header, Step, Verified
from vllm_specrollout.types import EMPTY_TREE, Choice, Decision, DraftTree, Ending, Feedback, RequestView, StepTiming


class RecordingPolicy:
    """Implements `Policy`; `inner` decides. Not thread-safe, like every policy."""

    def __init__(self, inner: Policy, header: Header, sink: Sink, clock: Callable[[], float]) -> None:
        """Args:
        clock: seconds, from any zero.
        """
        self.inner = inner
        self._limits = (header.max_draft_tokens, header.max_depth)
        self._max_num_seqs = header.max_num_seqs
        self._sink = sink
        self._clock = clock
        self._begin = clock()
        self._asked = 0.0
        # request id -> its number, and the tokens it has generated so far
        self._numbers: dict[str, int] = {}
        self._answers: dict[str, list[int]] = {}
        self._num_requests = 0
        self._decisions: list[Decision] = []
        # [views] number and position of each request asked for
        self._places: list[tuple[int, int]] = []
        # of the step in progress, which is written when the next one opens
        self._step: Step | None = None
        self._num_steps = 0
        self._ready_ms = 0.0
        sink.write(header)

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        self._open(feedback, timing)
        self.inner.observe(feedback, timing)

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        if self._step is None:
            self._open((), None)
        self._places = [self._see(view) for view in views]
        self._decisions = self.inner.decide(views)
        wide = [may_draft(view, *self._limits, d.reason) for view, d in zip(views, self._decisions, strict=True)]
        self._asked = self._clock()
        return wide

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        assert self._step is not None, "choose comes after decide"
        ask_ms = (self._clock() - self._asked) * 1e3
        candidates = tuple(
            Candidates(number, position, tree)
            for (number, position), tree in zip(self._places, trees, strict=True)
            if tree.size
        )
        self._step = replace(self._step, ask_ms=ask_ms, views=len(trees), candidates=candidates)
        if not any(decision.max_nodes for decision in self._decisions):
            # nobody would have been asked, nor this called
            return [EMPTY_TREE] * len(trees)
        own = [cut(tree, decision) for tree, decision in zip(trees, self._decisions, strict=True)]
        return self.inner.choose(own, self._decisions)

    def finish(self, ending: Ending) -> None:
        number = self._numbers.pop(ending.request_id, None)
        self._answers.pop(ending.request_id, None)
        # a request that may not be drafted for is never seen before its end, and a policy is no part of its story
        if number is not None:
            self._sink.write(
                End(
                    request=number,
                    status=ending.status.value,
                    token_ids=ending.token_ids,
                    weights_version=ending.weights_version,
                )
            )
        self.inner.finish(ending)

    def explain(self) -> Choice | None:
        return self.inner.explain()

    def close(self) -> None:
        """Write what is known of answers without an end, and end the trace."""
        self._flush()
        for request_id, number in self._numbers.items():
            tokens = np.asarray(self._answers[request_id], dtype=np.int32)
            self._sink.write(End(request=number, status=OPEN, token_ids=tokens))
        self._numbers.clear()
        self._answers.clear()
        self._sink.close()

    def _open(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        before = self._step
        self._flush()
        is_full = timing is None or timing.waiting > 0 or timing.batch >= self._max_num_seqs
        if before is not None and not is_full:
            # there was room in the step before, so who comes now did not exist when that one began
            self._ready_ms = before.at_ms
        verified = tuple(
            Verified(self._numbers[one.request_id], one.drafted, one.accepted)
            for one in feedback
            if one.request_id in self._numbers
        )
        self._step = Step(at_ms=(self._clock() - self._begin) * 1e3, timing=timing, verified=verified)

    def _flush(self) -> None:
        if self._step is not None:
            self._sink.write(self._step)
            self._step = None
            self._num_steps += 1

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
                step=self._num_steps,
                num_prompt_tokens=view.num_prompt_tokens,
                max_tokens=view.max_new_tokens + position,
                problem_id=view.problem_id,
                shape=view.shape,
                max_draft_tokens=view.max_draft_tokens,
                weights_version=view.weights_version,
                ready_ms=self._ready_ms,
            )
            self._sink.write(arrival)
        answer = self._answers[view.request_id]
        answer += view.token_ids[view.num_prompt_tokens + len(answer) :].tolist()
        return number, position
