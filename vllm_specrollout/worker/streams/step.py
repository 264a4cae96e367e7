"""What travels between a drafting engine's scheduler and its workers, on board of vLLM's own messages."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_specrollout.decoupled.counter import TAPE, NoiseKind
from vllm_specrollout.decoupled.stream import Choices
from vllm_specrollout.types import TreeBatch, empty_trees

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
