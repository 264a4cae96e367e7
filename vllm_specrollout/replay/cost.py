"""What a simulated step costs: a line fitted to all recorded steps at once.

A budget learns while it runs, so it forgets; a replay knows the whole run, so it does not. Drafting is taken out of the
steps first and fitted on its own, since a budget that asks no drafter does not pay for it:

    step_ms = fixed + request * requests + draft * [any nodes] + tree * trees + node * nodes + branch * branches
              + context * tokens attended to + ask + ask_request * requests asked for        (if drafters were asked)
              + prompt + prompt_row * rows                                                   (if prompts were computed)

Where a line that bends in the rows (broken_line.py) fits the steps better than a straight one, it is taken instead: a
batch of one and a batch with two hundred nodes do not lie on one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from vllm_specrollout.replay import broken_line
from vllm_specrollout.replay.broken_line import Floats
from vllm_specrollout.replay.records import Trace, TraceError
from vllm_specrollout.types import StepTiming

# Shares of `fixed` that the other terms are pulled to where the recording says nothing of them, and how strongly: in
# observations of one unit each. 2-core CPU, 150 M parameters.
_PRIOR = np.asarray([1.0, 0.03, 0.05, 0.03, 0.02, 0.0])
_PULL = np.asarray([0.01, 1.0, 1.0, 10.0, 10.0, 1000.0])
_ROUNDS = 8
_LEAST_STEPS = 8
_WORTH_BENDING = 0.005  # median relative error that a broken line must save


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one simulated step has to do."""

    # requests, those whose prompts are computed included
    batch: int
    nodes: int = 0
    branches: int = 0
    # requests with drafts
    trees: int = 0
    # tokens in the KV cache, all requests together
    context: int = 0
    # rows of prompts
    prompt_rows: int = 0
    # requests that drafters were asked for after it
    asked: int = 0


class Cost(Protocol):
    """Milliseconds of a step."""

    def step_ms(self, load: Load) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLine:
    """The line's terms, in milliseconds; none is negative."""

    fixed: float
    request: float = 0.0
    draft: float = 0.0
    tree: float = 0.0
    node: float = 0.0
    branch: float = 0.0
    context: float = 0.0
    ask: float = 0.0
    ask_request: float = 0.0
    prompt: float = 0.0
    prompt_row: float = 0.0
    # rows computed per token of a prompt: below 1 where samples share their prompts' blocks
    prompt_share: float = 1.0
    # per row, between each two of `broken_line.KNOTS` and beyond the last; empty: rows are in `request` and `node`
    rows: tuple[float, ...] = ()

    def step_ms(self, load: Load) -> float:
        ms = self.fixed + self.request * load.batch + self.context * load.context
        if self.rows:
            ms += broken_line.along(self.rows, load.batch + load.nodes)
        if load.nodes:
            ms += self.draft + self.tree * load.trees + self.node * load.nodes + self.branch * load.branches
        if load.prompt_rows:
            ms += self.prompt + self.prompt_row * load.prompt_rows
        return ms + (self.ask + self.ask_request * load.asked if load.asked else 0.0)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "rows": list(self.rows)}


def cost_of(trace: Trace) -> CostLine:
    """The line of a trace: the one it was made with, or the one that fits its steps.

    Raises:
        TraceError: too few decode steps with a time to fit anything, times that no line fits, or unknown terms.
    """
    if trace.header.cost:
        given = dict(trace.header.cost)
        try:
            line = CostLine(**{**given, "rows": tuple(given.get("rows", ()))})
        except TypeError:
            cause = f"the trace's cost has the terms {', '.join(given):.200}"
            raise TraceError(cause, "make the trace again") from None
        if len(line.rows) not in (0, len(broken_line.KNOTS)):
            raise TraceError(f"the trace's cost bends at {len(line.rows)} places", "make the trace again")
        return line
    try:
        with np.errstate(over="raise", invalid="raise"):
            return _fitted(trace)
    except (ArithmeticError, np.linalg.LinAlgError) as error:
        raise TraceError(f"no cost line fits the trace's times: {error}", "record it again") from None


def _fitted(trace: Trace) -> CostLine:
    steps = [step for i in range(len(trace.steps)) if (step := _timed(trace, i)) is not None]
    decode = [(timing, ask, asked) for timing, ask, asked, prompts in steps if timing.is_decode_only and not prompts]
    if len(decode) < _LEAST_STEPS:
        cause = f"the trace has {len(decode)} timed decode steps, and a cost line needs {_LEAST_STEPS}"
        raise TraceError(cause, "record a longer run")
    x = np.asarray([_features(timing) for timing, _, _ in decode])
    y = np.asarray([max(timing.step_ms - ask, 0.0) for timing, ask, _ in decode])
    terms = _fit(x, y, _PRIOR, _PULL)
    fixed, request, draft, node, branch, context = terms.tolist()
    ask, ask_request = _fit_ask([(ask, asked) for _, ask, asked, _ in steps if asked])
    line = CostLine(
        fixed=fixed,
        request=request,
        draft=draft,
        node=node,
        branch=branch,
        context=context,
        ask=ask,
        ask_request=ask_request,
    )
    bent = _bent([replace(timing, step_ms=ms) for (timing, _, _), ms in zip(decode, y.tolist(), strict=True)], line)
    if _error(bent, decode, y) < _error(line, decode, y) - _WORTH_BENDING:
        line = bent
    return _with_prompts(line, trace, steps)


def _bent(timings: Sequence[StepTiming], line: CostLine) -> CostLine:
    """The broken line through all steps alike, with the drafting of `line`."""
    terms = broken_line.fit([timing for timing in timings if timing.step_ms > 0.0]).tolist()
    fixed, request, draft, tree, branch, context = terms[: broken_line.NUM_OTHERS]
    return replace(
        line,
        fixed=fixed,
        request=request,
        draft=draft,
        tree=tree,
        node=0.0,
        branch=branch,
        context=context,
        rows=tuple(terms[broken_line.NUM_OTHERS :]),
    )


def _error(line: CostLine, decode: Sequence[tuple[StepTiming, float, int]], measured: Floats) -> float:
    """Median relative error."""
    found = np.asarray([line.step_ms(load_of(timing)) for timing, _, _ in decode])
    return float(np.median(np.abs(found - measured) / np.maximum(measured, 1e-9)))


def load_of(timing: StepTiming) -> Load:
    """A decode step's work, as far as its timing tells."""
    return Load(
        batch=timing.batch,
        nodes=timing.nodes,
        branches=timing.branches,
        trees=timing.trees or min(timing.nodes, timing.batch),
        context=timing.context,
    )


_Timed = tuple[StepTiming, float, int, list[int]]


def _timed(trace: Trace, step: int) -> _Timed | None:
    """A step's timing, the drafting in it, and the prompts whose last tokens it computed."""
    timing = trace.timing_of(step)
    # from one step's beginning to the next one's: on the V1 runner the drafting is at its end, on V2 at its beginning
    asking = step + trace.header.lag - 1
    if timing is None or timing.step_ms <= 0.0 or asking < 0:
        return None
    prompts = [arrival.num_prompt_tokens for arrival in trace.arrivals if arrival.step == step]
    return timing, trace.steps[asking].ask_ms, trace.steps[asking].views, prompts


def _features(timing: StepTiming) -> list[float]:
    return [1.0, timing.batch, float(timing.nodes > 0), timing.nodes, timing.branches, timing.context]


def _fit(x: Floats, y: Floats, shares: Floats, pull: Floats) -> Floats:
    """Least squares with terms of at least 0, a pull to typical proportions, and little weight for disturbed steps."""
    weights = np.ones(len(y))
    scale = float(np.median(y / np.maximum(x @ shares, 1e-9)))
    for _ in range(_ROUNDS):
        moments = (x * weights[:, None]).T @ x + np.diag(pull)
        products = (x * weights[:, None]).T @ y + pull * shares * scale
        terms = broken_line.non_negative(moments, products)
        residual = np.abs(y - x @ terms)
        bound = 3.0 * max(float(np.median(residual)), 1e-6)
        weights = np.minimum(1.0, bound / np.maximum(residual, 1e-12))
    return terms


def _fit_ask(asked: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Milliseconds of asking drafters: a fixed part, and one per request."""
    return _fit_two([requests for _, requests in asked], [ms for ms, _ in asked]) if asked else (0.0, 0.0)


def _fit_two(counts: Sequence[int], ms: Sequence[float]) -> tuple[float, float]:
    """A fixed part, and one for each of the counted."""
    x = np.asarray([[1.0, count] for count in counts])
    fixed, each = _fit(x, np.asarray(ms), np.asarray([1.0, 0.1]), np.asarray([0.01, 0.01])).tolist()
    return fixed, each


def _with_prompts(line: CostLine, trace: Trace, steps: Sequence[_Timed]) -> CostLine:
    """The line with what prompts add to a step."""
    nominal = sum(arrival.num_prompt_tokens for arrival in trace.arrivals)
    rows, extra = [], []
    for timing, ask, _, prompts in steps:
        computed = timing.rows - timing.nodes - (timing.batch - len(prompts))
        if timing.is_decode_only or computed <= 0:
            continue
        rows.append(computed)
        extra.append(max(timing.step_ms - ask - line.step_ms(load_of(timing)), 0.0))
    if not rows or not nominal:
        return replace(line, prompt_row=max(line.node, line.request, *line.rows))
    share = min(1.0, sum(rows) / nominal)
    if len(rows) == 1:
        return replace(line, prompt_row=extra[0] / rows[0], prompt_share=share)
    prompt, prompt_row = _fit_two(rows, extra)
    return replace(line, prompt=prompt, prompt_row=prompt_row, prompt_share=share)
