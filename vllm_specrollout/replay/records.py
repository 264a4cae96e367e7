"""What a trace holds: frozen records, one per line of the file.

May enter: the carriers. May not: files, clocks. How a record becomes text is in codec.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.types import DraftMode, DraftTree, IntArray, StepTiming

VERSION = 1
"""Of the format; a reader knows this one only."""
UNLIMITED = 1 << 30
"""A request's own limit on draft tokens when it has none."""
OPEN = "open"
"""Status of an answer whose end the recording has not seen; `types.FinishReason` has the others."""


class TraceError(SpecRolloutError):
    """A trace cannot be written, read or replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The engine that was recorded."""

    model: str = ""
    # the model runner, `v1` or `v2`: it decides how late budgets learn what a step cost
    runner: str = "v1"
    max_num_seqs: int
    max_num_batched_tokens: int = 1 << 30
    max_model_len: int = 1 << 30
    budget: str = "fixed"
    drafters: tuple[str, ...] = ()
    max_draft_tokens: int
    max_depth: int
    shape: str = "tree"
    # terms of `cost.CostLine`, for traces made without an engine; empty: fitted to the recorded steps
    cost: dict[str, Any] = field(default_factory=dict)

    @property
    def lag(self) -> int:
        """How many steps later than its drafts' verdicts a budget learns a step's time."""
        return 1 if self.runner == "v1" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request, as it stood when it could first be drafted for: its prompt is computed, one token sampled."""

    # counts from 0 in the order of admission; the other records' `request`
    request: int
    # the record of the step that computed the end of its prompt: an index into `Trace.steps`
    step: int
    num_prompt_tokens: int
    # most tokens that it may generate
    max_tokens: int
    problem_id: str = ""
    shape: DraftMode = DraftMode.TREE
    max_draft_tokens: int = UNLIMITED
    weights_version: int = 0
    # milliseconds since the recording began, before which it did not exist; 0.0 for those that were there at once
    ready_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the drafters proposed for a request, before the budget cut it."""

    request: int
    # tokens generated when it was made: a node of depth d stands for token `position + d - 1` of the answer
    position: int
    tree: DraftTree


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of the draft that the recorded budget chose."""

    request: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, as the budget saw it: verdicts, a step's cost, then the next drafts."""

    # milliseconds since the recording began, when the step's verdicts were known
    at_ms: float
    # milliseconds the drafters took for this step's candidates
    ask_ms: float = 0.0
    # requests that were drafted for, with or without success
    views: int = 0
    # of the step `Header.lag` records before this one; None: not known
    timing: StepTiming | None = None
    verified: tuple[Verified, ...] = ()
    candidates: tuple[Candidates, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """An answer that is over: the truth that replays walk along."""

    request: int
    # `types.FinishReason` by value, or OPEN
    status: str
    # [num_tokens] the whole answer
    token_ids: IntArray
    weights_version: int = 0


Record = Header | Arrival | Step | End


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded rollout."""

    header: Header
    # request -> its arrival
    arrivals: tuple[Arrival, ...]
    steps: tuple[Step, ...]
    # request -> its end; requests without one are left out
    ends: dict[int, End]
    # the file stopped in the middle: its writer was killed, or is still writing
    is_cut: bool = False

    def timing_of(self, step: int) -> StepTiming | None:
        """What a step cost: told `Header.lag` records later."""
        later = step + self.header.lag
        return self.steps[later].timing if later < len(self.steps) else None

    def measured_ms(self) -> float:
        """The recorded makespan: all steps that were timed, and the last ones, which nobody was told of.

        A step without a time took as long as from its predecessor's verdicts to its own.
        """
        total = 0.0
        for i, step in enumerate(self.steps):
            timing = self.timing_of(i)
            if timing is not None:
                total += timing.step_ms
            elif i:
                total += step.at_ms - self.steps[i - 1].at_ms
        return total
