"""Cost of a simulated step: the line that fits all recorded steps at once (budgets/step_cost.py).

What belongs here: which of a trace's steps say what. Drafting is taken out of the steps first and fitted on its own,
since a budget that asks no drafter does not pay for it; and what prompts add is found last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from vllm_specrollout.budgets.step_cost import CostLine, fit_line, fit_two
from vllm_specrollout.replay.records import Trace, TraceError
from vllm_specrollout.types import StepTiming

_LEAST_STEPS = 8


class Cost(Protocol):
    """Milliseconds of a step, and of asking drafters after it, as `CostLine` has them."""

    def step_ms(self, step: StepTiming, prompt_rows: int = 0, asked: int = 0) -> float: ...

    def ask_ms(self, asked: int) -> float: ...


def cost_of(trace: Trace) -> CostLine:
    """The line of a trace: the one it was made with, or the one that fits its steps.

    Raises:
        TraceError: too few decode steps with a time to fit anything, or times that no line fits.
    """
    if trace.header.cost != CostLine():
        return trace.header.cost
    try:
        with np.errstate(over="raise", invalid="raise"):
            return _fitted(trace)
    except (ArithmeticError, np.linalg.LinAlgError) as error:
        raise TraceError(f"no cost line fits the trace's times: {error}", "record it again") from None


_Timed = tuple[StepTiming, float, int, int]
"""A step's timing, milliseconds of the drafting in it, requests that was for, and prompts whose ends it computed."""


def _fitted(trace: Trace) -> CostLine:
    ends = Counter(arrival.step for arrival in trace.arrivals)
    steps = []
    for i in range(len(trace.steps)):
        # from one step's beginning to the next one's: the V1 runner drafts at its end, V2 at its beginning
        timing, asking = trace.timing_of(i), i + trace.header.lag - 1
        if timing is not None and timing.step_ms > 0.0 and asking >= 0:
            steps.append((timing, trace.steps[asking].ask_ms, trace.steps[asking].views, ends[i]))
    decode = [(timing, ask) for timing, ask, _, prompts in steps if timing.is_decode_only and not prompts]
    if len(decode) < _LEAST_STEPS:
        cause = f"the trace has {len(decode)} timed decode steps, and a cost line needs {_LEAST_STEPS}"
        raise TraceError(cause, "record a longer run")
    ms = np.asarray([max(timing.step_ms - ask, 0.0) for timing, ask in decode])
    line = fit_line([timing for timing, _ in decode], ms)
    asked = [(views, ask) for _, ask, views, _ in steps if views]
    if asked:
        ask, ask_request = fit_two(*zip(*asked, strict=True))
        line = msgspec.structs.replace(line, ask=ask, ask_request=ask_request)
    return _with_prompts(line, trace, steps)


def _with_prompts(line: CostLine, trace: Trace, steps: Sequence[_Timed]) -> CostLine:
    """The line with what prompts add to a step."""
    nominal = sum(arrival.num_prompt_tokens for arrival in trace.arrivals)
    rows, extra = [], []
    for timing, ask, _, prompts in steps:
        computed = timing.rows - timing.nodes - (timing.batch - prompts)
        if timing.is_decode_only or computed <= 0:
            continue
        rows.append(computed)
        extra.append(max(timing.step_ms - ask - line.step_ms(timing), 0.0))
    if not rows or not nominal:
        return msgspec.structs.replace(line, prompt_row=max(line.node, line.request, *line.rows))
    share = min(1.0, sum(rows) / nominal)
    if len(rows) == 1:
        return msgspec.structs.replace(line, prompt_row=extra[0] / rows[0], prompt_share=share)
    prompt, prompt_row = fit_two(rows, extra)
    return msgspec.structs.replace(line, prompt=prompt, prompt_row=prompt_row, prompt_share=share)
