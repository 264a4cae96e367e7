"""How long a forward pass takes: a base, a part per request, and a part per row that grows beyond a knee."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_specrollout.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """Milliseconds of one forward pass over a batch.

        base + request * requests + row * rows + (steep - row) * max(rows - knee, 0)

    Rows are all tokens computed: one per request, and the drafts. Below the knee a device reads its weights for longer
    than it computes, so that rows are cheap; beyond it they are not.
    """

    base: float
    request: float = 0.0
    row: float = 0.0
    # per row beyond `knee`
    steep: float = 0.0
    knee: float = math.inf

    def __post_init__(self) -> None:
        for name in ("base", "request", "row", "steep", "knee"):
            value = getattr(self, name)
            # a comparison that nan fails too
            if not value >= 0.0:
                raise ConfigError(f"`{name}` of a step's line is {value}, below 0", "give terms of at least 0")

    def ms(self, batch: float, drafts: float = 0.0) -> float:
        """Of so many requests with so many drafts each: what the formulas of `decoupled/` ask for."""
        return self.step_ms(batch, batch * drafts)

    def step_ms(self, requests: float, drafts: float = 0.0) -> float:
        """Of `requests` running requests with `drafts` draft tokens between them."""
        rows = requests + drafts
        beyond = max(rows - self.knee, 0.0)
        return self.base + self.request * requests + self.row * (rows - beyond) + self.steep * beyond
