"""What is measured in which order, and how a row is known again. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STEPS = {
    "checks": "what is installed, `specrollout doctor`, the kernels against their specifications",
    "stock": "stock vLLM alone: which runner, attention, graphs and scheduling it chose",
    "eager": "ours without CUDA graphs: whether its tokens are stock's",
    "graphs": "ours with CUDA graphs: whether its tokens are stock's",
    "kernels": "our kernels beside FlashAttention 3, timed in CUDA graphs",
    "speed": "our engine beside stock's: tokens, times, and how long the device idles",
    "memory": "device memory of CUDA graphs; only if asked for",
}
"""In the order in which they run."""
FIRST_HOUR = tuple(STEPS)[:6]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row."""

    # what a reader knows it by
    name: str
    # all that its figures depend on, besides versions, code and device; JSON types
    params: Mapping[str, Any]
    # seconds after which it is given up
    limit_s: float
    # seconds that it may well take: it is not begun with less time left
    expected_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows that share a process, and what that process sets up once for all of them."""

    step: str
    name: str
    # "module:class", made with (setup, tasks' params) in the child; see runner.py
    runner: str
    # JSON types
    setup: Mapping[str, Any] = field(default_factory=dict)
    # variables of the process and of all below it
    environment: Mapping[str, str] = field(default_factory=dict)
    tasks: tuple[Task, ...]
    # as those of a task, until it is set up
    limit_s: float
    expected_s: float
    # processes lost one after the other that end it: what is wrong then is not the row
    patience: int = 2

    @property
    def title(self) -> str:
        return self.step if self.name == self.step else f"{self.step}, {self.name}"


def key_of(step: str, params: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """A row's key: the same parameters, measured by the same code with the same versions on the same device."""
    text = json.dumps([step, params, identity], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
