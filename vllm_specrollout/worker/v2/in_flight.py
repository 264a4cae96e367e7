"""A step of the V2 runner whose tokens are on their way to the host, and what came home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_specrollout.speculator import PlannedStep
from vllm_specrollout.types import IntArray, StepTiming, TreeBatch

if TYPE_CHECKING:
    from vllm_specrollout.worker.v2.host import HostRequest


@dataclass(slots=True, eq=False)
class InFlight:
    """A step whose tokens are on their way to the host."""

    requests: list[HostRequest | None]
    # over the requests, in batch order
    trees: TreeBatch
    # what they were planned from; None: nothing was
    planned: PlannedStep | None
    # waits for the step's tokens; returns [R, width] sampled tokens and [R] how many of them count
    wait: Callable[[], tuple[IntArray, IntArray]]
    rows: int
    is_decode_only: bool
    # requests that had no place in the batch when the step was scheduled
    waiting: int = 0
    # milliseconds that its drafts took to be made
    ask_ms: float = 0.0
    # what the target computed, for a model that drafts
    computed: Any = None


@dataclass(slots=True)
class Settled:
    """Totals of the steps that came home in one wait."""

    steps: int = 0
    tokens: int = 0
    accepted: int = 0
    wait_ms: float = 0.0
    timings: list[StepTiming] = field(default_factory=list)


def tokens_of(output: Any, event: torch.cuda.Event) -> Callable[[], tuple[IntArray, IntArray]]:
    """What `InFlight.wait` is, for vLLM's output of a step whose tokens are copied when `event` is."""

    def wait() -> tuple[IntArray, IntArray]:
        event.synchronize()
        return output.sampled_token_ids, output.num_sampled_tokens_np

    return wait


def timing_of(step: InFlight, step_ms: float, tokens: int) -> StepTiming:
    """What a step cost that took so long from the tokens before it to its own."""
    return StepTiming(
        batch=len(step.requests),
        rows=step.rows,
        nodes=step.trees.num_nodes,
        # a masked kernel reads the context once however many branches there are
        branches=0,
        tokens=tokens,
        step_ms=step_ms,
        is_decode_only=step.is_decode_only,
        trees=int(np.count_nonzero(step.trees.sizes)),
        context=sum(request.length for request in step.requests if request is not None),
        waiting=step.waiting,
        ask_ms=step.ask_ms,
    )
