"""Anchors: step times by name, for what has no engine to be timed. A 7B model on one H200, host and asking included.

**Measured** were three figures in one run (bench/results/try.json, docs/adr/0030-a-first-gpu.md), with a design that
has been replaced since:

- A plain step takes 5.7 ms: 305 steps of 1 to 64 requests in 1.75 s, those that hold prompts included.
- A drafted step takes 9.5 to 10.5 ms: 256 rows, 12 to 64 requests.
- A drafted step that also holds a prompt takes 20 to 25 ms.

Nothing was measured below 12 requests, where a rollout's tail runs, above 64, or beyond 256 rows. `MEASURED` holds the
10 ms for every smaller batch, which is too much: with steps of 20 ms among them, the run's 148 steps took 9.5 ms in the
mean. `TAIL_RECKONED` has in their place what was reckoned for that design (1 x 15 drafts: 5.45 ms; 8 x 7: 5.75), raised
by the one ratio that is known: 10 ms measured for 8.4 reckoned, at 12 requests.

`RECKONED` is the design that ships, which has run on no GPU: bytes read and products computed at the H200's rates, at
1,024 tokens of context, with 0.3 ms of host a step and 6 us a request; prompts at half of the rate of its products.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from vllm_specrollout.types import StepTiming

Knots = tuple[tuple[float, float], ...]
"""(x, ms): straight lines between them, and the ends' values beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealSteps:
    """Milliseconds of a step: plain by requests; with drafts the sum of one by requests and one by rows."""

    plain: Knots
    drafted: Knots
    rows: Knots
    # more of a drafted step that holds a prompt
    prompt_ms: float
    # of each token of a prompt that is computed; 0.0: the plain steps have it in them
    prompt_row: float = 0.0

    def ms(self, batch: float, drafts: float = 0.0) -> float:
        """Of so many requests with so many drafts each."""
        if drafts <= 0.0:
            return _at(self.plain, batch)
        return _at(self.drafted, batch) + _at(self.rows, batch * (1.0 + drafts))

    def step_ms(self, step: StepTiming, prompt_rows: int = 0, asked: int = 0) -> float:
        """Of a replayed step."""
        prompts = self.prompt_row * prompt_rows
        if step.nodes and prompt_rows:
            prompts += self.prompt_ms
        return self.ms(step.batch, step.nodes / step.batch) + prompts

    def ask_ms(self, asked: int) -> float:
        """The figures have it in them."""
        return 0.0


def _at(knots: Knots, x: float) -> float:
    at = bisect_left(knots, (x,))
    if not 0 < at < len(knots):
        return knots[0 if at == 0 else -1][1]
    (left, low), (right, high) = knots[at - 1 : at + 1]
    return low + (high - low) * (x - left) / (right - left)


_PLAIN_MS, _RAISED = 1751.28 / 305, 10.0 / 8.4
MEASURED = RealSteps(
    plain=((64, _PLAIN_MS),),
    drafted=((64, 10.0),),
    # 22 us a row beyond the graphs' 256, reckoned
    rows=((256, 0.0), (2048, 39.4)),
    prompt_ms=22.5 - 10.0,
)
TAIL_RECKONED = replace(MEASURED, drafted=((1, 5.45 * _RAISED), (8, 5.75 * _RAISED), (12, 10.0)))
RECKONED = RealSteps(
    plain=((1, 4.43), (8, 4.43), (32, 4.90), (64, 5.34), (256, 10.4)),
    # attention, the rest of the model, sampling and host; the products stand below
    drafted=((1, 1.28), (8, 1.35), (32, 2.02), (64, 2.63), (256, 6.5)),
    rows=((128, 3.59), (192, 4.6), (256, 6.01), (320, 7.5), (512, 11.7), (2048, 45.5)),
    prompt_ms=0.0,
    # 14 Gflop a token at half of 989 Tflop/s
    prompt_row=0.03,
)


@dataclass(frozen=True, slots=True)
class Anchor:
    """Step times that have a name."""

    steps: RealSteps
    # whose they are
    told: str


ANCHORS = {
    "h200-7b": Anchor(RECKONED, "a 7B model on one H200, reckoned for the present design, which no GPU has run"),
    "h200-7b-first": Anchor(MEASURED, "a 7B model on one H200, measured with an earlier design at 12 to 64 requests"),
}
