"""Which engines an RL loop runs, and what it asks of all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..policy.tasks import Problem
from ..runner.engines import Engines, sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One engine of the loop."""

    name: str
    # `spec_rollout=` of our engine, None for vLLM's own
    spec_rollout: Mapping[str, Any] | None = None
    # `speculative_config=` of vLLM's own speculation
    speculative: Mapping[str, Any] | None = None
    # folders put before all others on the import path
    import_path: str = ""

    @property
    def is_ours(self) -> bool:
        return self.spec_rollout is not None

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "spec_rollout": self.spec_rollout, "speculative_config": self.speculative}

    def start(self, engines: Engines) -> None:
        """Start its engine; every arm's gets the same arguments but for its drafts."""
        ours = None if self.spec_rollout is None else dict(self.spec_rollout)
        more = {} if self.speculative is None else {"speculative_config": dict(self.speculative)}
        engines.start(self.name, ours, environment={"PYTHONPATH": self.import_path} if self.import_path else {}, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer to ask for; the same for every engine."""

    request_id: str
    problem: Problem
    sample: int
    seed: int
    prompt_ids: tuple[int, ...]

    def params(self, max_tokens: int, *, is_ours: bool) -> dict[str, Any]:
        """Keyword arguments of `SamplingParams`. Only our engine is told which problem it is."""
        return sampling(self.seed, max_tokens, {"problem_id": self.problem.problem_id} if is_ours else None)


def overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, object by object."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = overlaid(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def suffix_problem(import_path: str) -> str | None:
    """Why vLLM's suffix decoding cannot run in an engine with this import path; None if it can."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import arctic_inference.suffix_decoding"],
        env={**os.environ, **({"PYTHONPATH": import_path} if import_path else {})},
        capture_output=True,
        text=True,
        check=False,
    )
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1] if done.returncode else None
