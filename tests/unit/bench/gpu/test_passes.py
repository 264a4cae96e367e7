"""A drafter's passes: who is asked anew in each, and what is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.gpu.micro import passes
from vllm_specrollout.cluster.line import Ask


class Noted:
    """An engine that notes what it is asked."""

    def __init__(self) -> None:
        self.running: dict[str, Ask] = {}
        # of each pass: requests, and those that are new
        self.steps: list[tuple[int, int]] = []
        self._added = 0

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            del self.running[name]

    def add(self, ask: Ask, sampling: Any) -> None:
        self.running[ask.name], self._added = ask, self._added + 1

    def step(self) -> None:
        self.steps.append((len(self.running), self._added))
        self._added = 0


def test_every_pass_is_full_and_none_one_and_all_are_new_in_turns() -> None:
    engine = Noted()
    rows = list(passes(engine, 4, 6))
    assert engine.steps[0] == (4, 4) and engine.steps[3:] == [(4, 0), (4, 1), (4, 4)] * 3
    assert [row.name for row in rows] == [
        f"a drafter's pass of 4, {kind} asked anew" for kind in ("none", "one", "all")
    ]
    assert all(row.unit == "ms" and row.measured >= 0.0 for row in rows) and not engine.running
