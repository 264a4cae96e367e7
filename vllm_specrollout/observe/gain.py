"""Gain of drafting: what decode steps yielded and took, and what plain ones would have taken for as much. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_specrollout.types import StepRecord


@dataclass(slots=True)
class Gain:
    """Of decode steps alone: prompts cost the same with drafts and without."""

    # steps of all requests, and what these got
    request_steps: int = 0
    output_tokens: int = 0
    # that the steps took; and that plain steps would have taken, where the budget knows
    spent_ms: float = 0.0
    plain_ms: float = 0.0
    is_known: bool = False

    def add(self, record: StepRecord) -> None:
        timing, plan = record.timing, record.plan
        if timing is None or not timing.is_decode_only or not timing.batch or timing.step_ms <= 0.0:
            return
        self.request_steps += timing.batch
        self.output_tokens += timing.tokens
        self.spent_ms += timing.step_ms
        plain = 0.0 if plan is None else plan.plain_ms
        # a step without drafts is a plain one
        self.is_known |= plain > 0.0
        self.plain_ms += plain * timing.tokens / timing.batch if timing.nodes and plain > 0.0 else timing.step_ms

    @property
    def tokens_per_step(self) -> float:
        """Of one request."""
        return self.output_tokens / max(self.request_steps, 1)

    @property
    def speedup(self) -> float:
        return self.plain_ms / self.spent_ms if self.spent_ms else 1.0
