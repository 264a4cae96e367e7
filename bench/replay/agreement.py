"""Does a replay foretell the engine? One recorded rollout, every budget replayed on it, every budget run for real."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_specrollout.replay.files import read_trace
from vllm_specrollout.replay_cli import run_all

from .rollouts import Rollout, at_once, run, start, warm_up

RECORDED = "auto"  # its steps have drafts of all sizes, and none: what each costs is seen, not extrapolated


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One budget, foretold and measured."""

    name: str
    # per round: what the replay of that round's recording says, and the engine's makespan
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]

    @property
    def error(self) -> float:
        """Median over the rounds."""
        pairs = zip(self.predicted_s, self.measured_s, strict=True)
        return statistics.median(predicted / measured for predicted, measured in pairs) - 1.0


def compare(names: Sequence[str], rollout: Rollout, rounds: int, tell: Callable[[str], None]) -> list[Agreement]:
    """One engine runs all budgets in turn; each pass with a fresh one, as replays have it, and one of them recorded.

    A host's speed drifts, and two engines on it differ. So each round holds every budget once, the rounds go through
    them both ways, and what a round measured is compared with what its own recording foretells.
    """
    arms = list(names) if RECORDED in names else [RECORDED, *names]
    measured: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, start(rollout, RECORDED) as engine:
        paths = [Path(folder) / f"{number}.jsonl.zst" for number in range(rounds)]
        warm_up(engine, rollout)
        for number, path in enumerate(paths):
            seconds: dict[str, float] = {}
            for name in arms if number % 2 == 0 else reversed(arms):
                tell(f"round {number + 1} of {rounds}: {name}")
                record = str(path) if name == RECORDED else None
                engine.ask("rpc", method="spec_rollout_set_budget", name=name, is_profiled=False, record=record)
                seconds[name] = run(engine, rollout, rollout.noise[-1])
            measured.append(seconds)
        # completes the last recording
        engine.ask("rpc", method="spec_rollout_set_budget", name="off")
        tell("replaying")
        predicted = [run_all(at_once(read_trace(path)), names) for path in paths]
    return [
        Agreement(
            name=name,
            predicted_s=tuple(one[name].makespan_ms / 1e3 for one in predicted),
            measured_s=tuple(one[name] for one in measured),
        )
        for name in names
    ]
