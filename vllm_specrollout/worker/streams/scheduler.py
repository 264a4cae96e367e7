"""The scheduler of an engine that drafts: requests are streams, which rest, grow by verdicts alone, and never end.

What belongs here: what stock vLLM's scheduler must do differently. Which stream may draft, and what it looks at, is in
cluster/stream.py. A stream's drafted tokens are draft tokens to vLLM as well: none of them is ever accepted here, so
each pass begins behind the last token that holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_specrollout.cluster.counter import TAPE, NoiseKind
from vllm_specrollout.cluster.stream import Choices, Look, Stream
from vllm_specrollout.drafters.levels import CHOICES, Sharpness
from vllm_specrollout.trees.batch import batch_of
from vllm_specrollout.types import DraftTree, TreeBatch, empty_trees

_STEP = "spec_rollout_streams"


@dataclass(frozen=True, slots=True)
class Follow:
    """How a request's tokens are chosen."""

    # 1.0 for greedy requests, whose seeds are None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    # [1 + nodes] noise of what comes behind each row, or what it is counted from; and places, counted from 0
    seeds: list[int | None]
    places: list[int]


@dataclass(frozen=True, slots=True)
class StreamStep:
    """What a pass looks at, and which requests have new tokens."""

    # request -> tokens that it has got since the worker heard of it last
    grown: dict[str, list[int]] = field(default_factory=dict)
    # scheduled request -> how its tokens are chosen
    follow: dict[str, Follow] = field(default_factory=dict)
    # over the scheduled requests
    trees: TreeBatch = field(default_factory=lambda: empty_trees([]))
    # tokens behind each row: the first choice, and those beside it
    fan_out: int = 1
    # of first choices, and of those beside them
    sharpness: tuple[float, float] = (1.0, 1.0)
    # whether the candidates for the sharpness are tried
    is_trial: bool = False
    # what seeds are
    noise: NoiseKind = TAPE


def put_step(output: SchedulerOutput, step: StreamStep) -> None:
    setattr(output, _STEP, step)


def step_of(output: SchedulerOutput) -> StreamStep:
    """The step's; an engine that warms up has none."""
    return getattr(output, _STEP, StreamStep())


@dataclass
class StreamOutput(ModelRunnerOutput):
    """A step's output with what the drafter would have behind each row."""

    # request -> [1 + nodes]
    choices: dict[str, list[Choices]] = field(default_factory=dict)

    @classmethod
    def carrying(cls, output: ModelRunnerOutput, choices: dict[str, list[Choices]]) -> StreamOutput:
        values: dict[str, Any] = {f.name: getattr(output, f.name) for f in fields(output)}
        return cls(**{**values, "choices": choices})


_LEARN_EVERY = 8  # passes after which the candidates for the sharpness are compared once


class StreamScheduler(Scheduler):
    """Schedules the streams that may draft."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # request -> its stream
        self.streams: dict[str, Stream] = {}
        self.sharpness, self.second_sharpness = Sharpness(), Sharpness()
        self.noise = TAPE
        """What the seeds of the streams are."""
        self.passes = 0
        # [streams of the last pass] nodes that it looked at
        self.looked: list[int] = []
        # request -> tokens that the worker does not know yet
        self._grown: dict[str, list[int]] = {}
        # streams that lost their blocks while a pass was scheduled
        self._preempted: list[str] = []

    @property
    def may_draft(self) -> bool:
        """Whether a pass would draft anything."""
        return any(stream.may_draft for stream in self.streams.values())

    def grow(self, name: str, tokens: list[int]) -> None:
        """These hold as well: the worker learns of them with the next pass."""
        request = self.requests[name]
        if request.status == RequestStatus.WAITING:
            # no worker knows it yet, and it will be told of the prompt alone: so they are part of that
            prompt, params = [*request.all_token_ids, *tokens], request.sampling_params
            self.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.add_request(Request(name, prompt, params, None))
            return
        request.append_output_token_ids(tokens)
        self._grown.setdefault(name, []).extend(tokens)

    def end(self, name: str) -> None:
        """The stream is of no more use."""
        self.learn(self.streams.pop(name))
        self._grown.pop(name, None)
        self.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def learn(self, stream: Stream) -> None:
        """Which candidates for the sharpness the target agreed with."""
        for met in stream.met:
            self.sharpness.observe(met[None, 1 : 1 + len(CHOICES)])
            if not met[0]:
                # a choice beside the first one counts where that was wrong
                self.second_sharpness.observe(met[None, 1 + len(CHOICES) :])
        stream.met.clear()

    # --- the pass ----------------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        everybody = self.running
        self.running = [request for request in everybody if self.streams[request.request_id].may_draft]
        resting = [request for request in everybody if not self.streams[request.request_id].may_draft]
        looks = {request.request_id: self.streams[request.request_id].look() for request in self.running}
        for request in self.running:
            request.spec_token_ids = looks[request.request_id].token_ids
        output = super().schedule(*args, **kwargs)
        self.running.extend(resting)
        while self._preempted:
            self.end(self._preempted.pop())
        names = [name for name in output.num_scheduled_tokens if name in self.streams]
        grown, self._grown = self._grown, {}
        self.passes += bool(names)
        for name in names:
            if name not in looks:
                looks[name] = self.streams[name].look()  # a prompt: the root alone
        drafted = output.scheduled_spec_decode_tokens
        self.looked = [len(drafted.get(name, ())) for name in names]
        put_step(
            output,
            StreamStep(
                grown,
                {name: self._follow(name, looks[name]) for name in names},
                batch_of(names, [_tree(looks[name], len(drafted.get(name, ()))) for name in names]),
                max((self.streams[name].fan_out for name in names), default=1),
                (self.sharpness.value, self.second_sharpness.value),
                self.passes % _LEARN_EVERY == 1,
                self.noise,
            ),
        )
        return output

    def _follow(self, name: str, look: Look) -> Follow:
        stream, opened = self.streams[name], self.streams[name].opened
        seeds, places = [stream.seed(depth) for depth in look.depths], [stream.place(depth) for depth in look.depths]
        return Follow(opened.temperature or 1.0, opened.top_k, opened.top_p, opened.min_p, seeds, places)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """A stream that loses its blocks ends: the verifier misses it after a while, and opens it anew."""
        self._preempted.append(request.request_id)
        return super()._preempt_request(request, *args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if isinstance(model_runner_output, StreamOutput):
            for name, choices in model_runner_output.choices.items():
                request = self.requests.get(name)
                if request is not None and request.num_computed_tokens >= request.num_tokens:
                    self.streams[name].grow(choices)
                    # nothing that was drafted is kept; the last token that holds is computed again
                    request.num_computed_tokens = request.num_tokens - 1
        return outputs


def _tree(look: Look, count: int) -> DraftTree:
    """As much of it as there was room for."""
    none = np.zeros(count, dtype=np.float32)
    tokens, parents = np.asarray(look.token_ids[:count], np.int32), np.asarray(look.parents[:count], np.int32)
    return DraftTree(tokens, parents, none, none.astype(np.int32))
