"""`specrollout bench index`: the history index beside arctic-inference's suffix cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from vllm_specrollout.cli import flags as cli_flags
from vllm_specrollout.config import MAX_NODES
from vllm_specrollout.config.drafters import HistoryConfig

from ..runner.report import Found, Table, host
from ..runner.results import INDEX
from ..runner.scenario import Scenario, Session, command, flag
from .data import recorded, synthetic
from .measure import compare, flatness, many_problems, on_the_device
from .systems import ARCTIC, load_arctic

DATA = ("recorded", "synthetic", "lookup")
"""The lookup is over the recorded answers, too; it is no part of the comparison with the other system."""
_CONFIG = HistoryConfig(min_match=1)
_UNITS, _SIZES = 6, (8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class IndexScenario(Scenario):
    """The history index beside arctic-inference's suffix cache: time, memory, accepted tokens."""

    bench: ClassVar[str] = "index"

    data: tuple[str, ...] = flag(DATA, "What to compare on; `lookup`: the device's beside the index.", choices=DATA)
    nodes: int = flag(32, "Most nodes of a draft, in both.", within=(1, MAX_NODES))
    batch: int = flag(64, "Requests that ask at once.", within=(1, 4096))
    problems: int = flag(2, "Synthetic problems, with 16 answers in each of two epochs.", within=(1, 1000))
    tokens: int = flag(16_384, "Tokens of a synthetic answer.", within=(64, 1 << 20))
    drafted: int = flag(1024, "Last tokens of it that are drafted.", within=(1, 1 << 20))
    seed: int = flag(0, "Of the synthetic answers.", within=(0, 1 << 30))

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "arctic": ARCTIC, "config": asdict(_CONFIG)}

    def check(self) -> None:
        super().check()
        cli_flags.in_range(self.drafted, "--drafted", 1, self.tokens)
        if set(self.data) != {"lookup"}:
            load_arctic()

    def measure(self, session: Session) -> Found:
        config, nodes, rows = _CONFIG, self.nodes, []
        units = {"recorded": _UNITS + 1, "synthetic": _UNITS + 2, "lookup": 2 * len(_SIZES)}
        report = session.display.steps(sum(units[name] for name in self.data))
        if "recorded" in self.data:
            held = recorded()
            rows += compare(held, config, nodes, self.batch, 0, report)
            rows += many_problems(held, config, 10_000, report)
        if "lookup" in self.data:
            held = recorded()
            rows += on_the_device(held, config, _SIZES, True, self.batch, report)
            rows += on_the_device(held, config, _SIZES, False, self.batch, report)
        if "synthetic" in self.data:
            made = synthetic(self.problems, 16, self.tokens, 1, self.seed)
            rows += compare(made, config, nodes, self.batch, self.tokens - self.drafted, report)
            rows.append(flatness(config, nodes, self.seed, (10_000, 1_000_000), report))
        return Found(rows=rows)

    def title(self, found: Found) -> str:
        return f"history index beside arctic-inference {ARCTIC}, {self.nodes} nodes; {host()['cpu']}"

    def told(self, found: Found) -> Iterable[Table]:
        """One line per comparison."""
        return [Table(found.rows, INDEX, left=2)]


bench_index = command(IndexScenario)
