"""One stock engine, and one of ours whose budget and oracle change between runs; what sweep and ramp share.

Both engines are in their processes as a whole, without an engine core apart: requests then arrive at the same step in
every run, and an idle engine takes no processor time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .engine_process import EngineProcess, EngineSpec
from .runs import Run, first_difference

SEEDS = 3
"""How many seeds are tried where stock vLLM itself meets a tie; see docs/concepts/exactness.md."""
SEED_STEP = 1_000_003
_IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A budget of our engine: a preset, and its limits where they are not the engine's."""

    name: str
    # None: the engine's
    max_draft_tokens: int | None = None
    length_weight: bool = True
    # whether waiting requests get their places longest first
    longest_first: bool = True

    @property
    def title(self) -> str:
        draft = "" if self.max_draft_tokens is None else f" {self.max_draft_tokens}"
        without = [
            *([] if self.length_weight else ["length weight"]),
            *([] if self.longest_first else ["longest first"]),
        ]
        return self.name + draft + (f" without {', '.join(without)}" if without else "")


AUTO = Budget(name="auto")


class Engines:
    """Stock and ours; a context manager."""

    def __init__(
        self, arguments: dict[str, Any], spec_rollout: dict[str, Any], scratch: Path, *, kv_gib: int, is_verbose: bool
    ) -> None:
        self._oracle = scratch / "oracle.json"
        self._oracle.write_text("{}", encoding="utf-8")
        if "oracle" in spec_rollout["drafters"]:
            spec_rollout = {**spec_rollout, "oracle": {"path": str(self._oracle)}}
        common: dict[str, Any] = {
            "arguments": arguments,
            "kv_gib": kv_gib,
            "is_verbose": is_verbose,
            "environment": _IN_PROCESS,
        }
        self._specs = (
            EngineSpec(name="stock", **common),
            EngineSpec(name="spec rollout", has_plugin=True, spec_rollout=spec_rollout, **common),
        )
        self._stack = ExitStack()

    def __enter__(self) -> Engines:
        with ExitStack() as stack:
            self.stock, self.ours = [stack.enter_context(EngineProcess(spec)) for spec in self._specs]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def set_budget(self, budget: Budget, *, is_fresh: bool = True) -> None:
        """A fresh policy, which has learned nothing yet; or this budget's last one, which goes on learning."""
        limit = budget.max_draft_tokens
        self.ours.ask("order_queue", longest_first=budget.longest_first)
        self.ours.ask(
            "rpc",
            method="spec_rollout_set_budget",
            name=budget.name,
            max_draft_tokens=limit,
            max_depth=limit,
            length_weight=budget.length_weight,
            is_fresh=is_fresh,
        )

    def run(
        self,
        engine: EngineProcess,
        prompts: list[list[int]],
        params: list[dict[str, Any]],
        arrives_after: list[int] | None = None,
        reload_after: int | None = None,
    ) -> Run:
        """These requests to their ends; see `engine_child.Engine.generate_in_waves`. Default: all arrive at once."""
        reply = engine.ask(
            "generate_in_waves",
            prompts=prompts,
            params=params,
            arrives_after=[0] * len(prompts) if arrives_after is None else arrives_after,
            reload_after=reload_after,
            folder=str(engine.spec.arguments["model"]),
            stats=engine is self.ours,
        )
        return Run.from_child(reply)

    def set_answers(self, run: Run, accuracy: float, position: int | None = None) -> None:
        """What the oracle drafts: stock's answers, under the requests' numbers; from `position` on, decoys only."""
        answers = {str(i): list(ids) for i, ids in enumerate(run.token_ids)}
        self._oracle.write_text(json.dumps(answers), encoding="utf-8")
        self.ours.ask(
            "rpc", method="spec_rollout_set_oracle", path=str(self._oracle), accuracy=[accuracy], position=position
        )

    def switches(self) -> dict[str, int]:
        """How often the present policy went on and off since the last call."""
        return self.ours.ask("rpc", method="spec_rollout_switches")


def differs(stock: Run, runs: Sequence[Run]) -> bool:
    """Whether any of these runs has other tokens than stock's."""
    return any(first_difference(stock, run) is not None for run in runs)
