"""Records of a trace: one per line of JSON, with the types and ranges that each value must have.

May enter: the carriers. May not: files, clocks. Probabilities are kept in thousandths of a nat, times in microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np

from vllm_specrollout.budgets.step_cost import COLUMNS, MOST, CostLine, Count, Ms, Timing
from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.types import MOST_NODES, ROOT, SOURCES, DraftMode, DraftTree, StepTiming

Magic = Literal["vllm-specrollout trace"]
MAGIC: Magic = "vllm-specrollout trace"
VERSION = 1
"""Of the format; a reader knows this one only."""
UNLIMITED = 1 << 30
"""A request's own limit on draft tokens when it has none."""
Status = Literal["open", "finished", "truncated", "aborted"]
OPEN: Status = "open"
"""Status of an answer whose end the recording has not seen; `types.FinishReason` has the others."""
_NATS = 1000.0

Positive = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
Levels = Annotated[int, msgspec.Meta(ge=1, le=MOST_NODES)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Parent = Annotated[int, msgspec.Meta(ge=ROOT, lt=MOST_NODES)]
Source = Annotated[int, msgspec.Meta(ge=0, lt=SOURCES)]


class TraceError(SpecRolloutError):
    """A trace cannot be written, read or replayed."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The engine that was recorded."""

    trace: Magic = MAGIC
    version: int = VERSION
    model: str = ""
    # the model runner: it decides how late budgets learn what a step cost
    runner: Literal["v1", "v2"] = "v1"
    max_num_seqs: Positive
    max_num_batched_tokens: Positive = 1 << 30
    max_model_len: Positive = 1 << 30
    budget: str = "fixed"
    drafters: tuple[str, ...] = ()
    max_draft_tokens: Levels
    max_depth: Levels
    shape: Literal["tree", "chain"] = "tree"
    # of traces made without an engine; without terms: fitted to the recorded steps
    cost: CostLine = CostLine()
    # names of the columns of a timing
    timing: tuple[str, ...] = COLUMNS

    @property
    def lag(self) -> int:
        """How many steps later than its drafts' verdicts a budget learns a step's time."""
        return 1 if self.runner == "v1" else 0


class Arrival(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="arrival"):
    """A request, as it stood when it could first be drafted for: its prompt is computed, one token sampled."""

    # counts from 0 in the order of admission; the other records' `request`
    request: Count
    # the record of the step that computed the end of its prompt: an index into `Trace.steps`
    step: Count
    num_prompt_tokens: Count
    # most tokens that it may generate
    max_tokens: Count
    problem_id: str = ""
    shape: DraftMode = DraftMode.TREE
    max_draft_tokens: Count = UNLIMITED
    weights_version: Count = 0
    # milliseconds since the recording began, before which it did not exist; 0.0 for those that were there at once
    ready_ms: Ms = 0.0
    # tokens that end its answer, ascending; none in recordings that do not tell
    ends: tuple[Token, ...] = ()


class Candidates(msgspec.Struct, frozen=True, array_like=True):
    """What the drafters proposed for a request, before the budget cut it."""

    request: Count
    # tokens generated when it was made: a node of depth d stands for token `position + d - 1` of the answer
    position: Count
    # [N] as in a DraftTree
    token_ids: list[Token]
    parents: list[Parent]
    # [N] -1000 times the natural log of each node's probability
    nats: list[Count]
    # [N] or one number for all: nearly all trees come from one drafter
    source: Source | list[Source]

    @classmethod
    def of(cls, request: int, position: int, tree: DraftTree) -> Candidates:
        nats = np.rint(tree.log_q * -_NATS).astype(np.int64).tolist()
        sources = tree.source.tolist()
        source = sources[0] if len(set(sources)) == 1 else sources
        return cls(request, position, tree.token_ids.tolist(), tree.parents.tolist(), nats, source)

    @property
    def is_tree(self) -> bool:
        """Whether the columns are equally long, and no child comes before its parent."""
        count = len(self.token_ids)
        columns = (self.parents, self.nats, self.source if isinstance(self.source, list) else self.nats)
        is_before = all(parent < i for i, parent in enumerate(self.parents))
        return count <= MOST_NODES and is_before and all(len(column) == count for column in columns)

    @property
    def tree(self) -> DraftTree:
        token_ids, parents = np.asarray(self.token_ids, np.int32), np.asarray(self.parents, np.int32)
        log_q = (np.asarray(self.nats, np.float64) / -_NATS).astype(np.float32) + np.float32(0.0)
        return DraftTree(token_ids, parents, log_q, np.full(len(log_q), self.source, np.int32))


class Verified(msgspec.Struct, frozen=True, array_like=True):
    """What became of the draft that the recorded budget chose."""

    request: Count
    drafted: Count
    accepted: Count


class Step(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """One step, as the budget saw it: verdicts, a step's cost, then the next drafts."""

    # milliseconds since the recording began, when the step's verdicts were known
    at_ms: Ms
    # milliseconds the drafters took for this step's candidates
    ask_ms: Ms = 0.0
    # requests that were drafted for, with or without success
    views: Count = 0
    # why the coming step has its drafts, or none; empty: the budget was not asked
    reason: str = ""
    # of the step `Header.lag` records before this one; None: not known
    timing: Timing | None = None
    verified: tuple[Verified, ...] = ()
    # drafter -> its nodes among those that this step verified; empty: there are none
    sources: tuple[Count, ...] = ()
    candidates: tuple[Candidates, ...] = msgspec.field(default=(), name="drafts")


class End(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    """An answer that is over: the truth that replays walk along."""

    request: Count
    status: Status
    # the whole answer
    token_ids: list[Token] = msgspec.field(name="tokens")
    weights_version: Count = 0


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
        timing = self.steps[later].timing if later < len(self.steps) else None
        return None if timing is None else timing.step()

    def measured_ms(self) -> float:
        """Of the recorded steps together: those that were timed, and the last ones, which nobody was told of.

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


class _Opening(msgspec.Struct):
    trace: Magic
    version: int


encode = msgspec.json.Encoder().encode
"""A record's line, without its end."""
_decode = msgspec.json.Decoder(Arrival | Step | End).decode


def decode_header(line: bytes | bytearray) -> Header | int:
    """The header, or the version of another format.

    Raises:
        ValueError: the line opens no trace.
    """
    version = msgspec.json.decode(line, type=_Opening).version
    if version != VERSION:
        return version
    header = msgspec.json.decode(line, type=Header)
    if any(ours != theirs for ours, theirs in zip(COLUMNS, header.timing, strict=False)):
        raise ValueError(f"its timings have the columns {', '.join(header.timing):.200}")
    return header


def decode(line: bytes | bytearray) -> Arrival | Step | End:
    """The record of a line that is not the header.

    Raises:
        ValueError: it holds what no engine writes.
    """
    record = _decode(line)
    if isinstance(record, Step) and not all(candidates.is_tree for candidates in record.candidates):
        raise ValueError("the columns of a draft are no tree")
    return record


def round_ms(value: float) -> float:
    return round(float(value), 3)
