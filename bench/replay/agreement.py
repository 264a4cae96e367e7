"""Does a replay foretell the engine? One recorded rollout, every budget replayed on it, every budget run for real."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_specrollout.replay.files import read_trace
from vllm_specrollout.replay_cli import run_all

from .rollouts import Rollout, run, start, warm_up, without_first

RECORDED = "auto"  # its steps have drafts of all sizes, and none: what each costs is seen, not extrapolated


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One budget, foretold and measured."""

    name: str
    predicted_s: float
    # median over the rounds
    measured_s: float
    # per round
    rounds_s: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0


def compare(names: Sequence[str], rollout: Rollout, rounds: int, tell: Callable[[str], None]) -> list[Agreement]:
    """Engines run one after the other, a few alive at once; the recording one is not timed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl.zst"
        tell(f"recording with {RECORDED}")
        with start(rollout, RECORDED, record=path) as engine:
            count = warm_up(engine, rollout)
            run(engine, rollout, rollout.noise[-1])
        trace = without_first(read_trace(path), count)
    results = run_all(trace, names)
    found = []
    for name in names:
        tell(f"running {name}")
        with start(rollout, name) as engine:
            warm_up(engine, rollout)
            seconds = tuple(run(engine, rollout, rollout.noise[-1]) for _ in range(rounds))
        predicted = results[name].makespan_ms / 1e3
        found.append(
            Agreement(name=name, predicted_s=predicted, measured_s=statistics.median(seconds), rounds_s=seconds)
        )
    return found
