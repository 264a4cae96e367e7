"""`specrollout bench soak`: a server under load and faults for hours: what it holds; whether it answers as stock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm_specrollout.config import parse

from ..runner.engines import IN_ONE_PROCESS, PROMPT_LEN, STOCK
from ..runner.fields import Row
from ..runner.models import check_length, find_model
from ..runner.report import Found, Table
from ..runner.results import SOAK
from ..runner.scenario import EngineScenario, Session, command, flag
from ..runner.server import serve
from ..runner.ties import JUDGE
from . import checks
from .checks import Comparison, compare
from .drive import MOST_TOLD, Observations, Soak
from .faults import AWAY, FULL, KILL, STALL, Fault, plan


@dataclass(frozen=True, kw_only=True)
class SoakScenario(EngineScenario):
    """Drive a server for hours: arrivals, clients that leave, epochs, rewards and faults."""

    bench: ClassVar[str] = "soak"

    hours: float = flag(0.5, "How long requests arrive.", within=(0.001, 1000))
    model: Path | None = flag(None, "A model's folder; without it, the project's policy.", is_setting=False)
    spec_rollout: dict[str, Any] = flag({}, "Keys of the server's configuration beside `history.dir`.")
    faults: bool = flag(False, "Also inflict faults from outside: full disk, folder gone, stalls, drafters killed.")
    rate: float = flag(2.0, "Requests that arrive per second, at random (Poisson).", within=(0.001, 10000))
    recurring: float = flag(0.5, "Share of requests whose problem comes back.", within=(0, 1))
    pool: int = flag(32, "Problems that come back.", within=(1, 100000))
    grammar: float = flag(0.1, "Share of requests with a grammar.", within=(0, 1))
    choices: float = flag(0.1, "Share of requests for several answers.", within=(0, 1))
    leaving: float = flag(0.1, "Share of clients that leave before the end.", within=(0, 1))
    checked: int = flag(500, "Requests, about, whose answers are compared with stock's.", within=(0, 1000000))
    max_tokens: int = flag(256, "Tokens after which an answer is cut.", within=(2, 1 << 16))
    seqs: int = flag(16, "Requests that the server runs at once.", within=(1, 1024))
    most_open: int = flag(48, "Requests that are open at once; later ones wait outside.", within=(1, 100000))
    kv_mib: int = flag(
        64, "MiB of the server's KV cache; small, so that all of it is in use soon.", within=(1, 1 << 20)
    )
    epoch_s: float = flag(60.0, "Seconds from one epoch to the next.", within=(1, 1000000))
    settle_s: float = flag(300.0, "Seconds after which nothing may grow.", within=(0, 1000000))
    growth: float = flag(0.02, "Share by which memory may grow after that.", within=(0, 10))
    disk_mib: float = flag(64.0, "Most MiB of the history's folder.", within=(0.1, 1 << 30))

    @property
    def duration_s(self) -> float:
        return self.hours * 3600.0

    def measure(self, session: Session) -> Found:
        folder, title = find_model(self.model, None, self.dtype, self.cache, session.display, is_policy=True)
        check_length(folder, self._length)
        history = session.scratch / "kept" / "history"
        history.parent.mkdir()
        faults = self._planned()
        own = self._configuration(history)
        with serve(folder, self._flags(), own, is_verbose=self.verbose) as server:
            outcome = Soak(server, self, faults, history, session.display.counter("seconds")).run()
            is_alive = server.is_alive
        compared = self._compared(folder, outcome, session)
        rows = self._checks(outcome, compared, is_alive)
        told = [*outcome.told, *compared.differences, *compared.ties]
        extra = {
            "compared": {"answers": compared.answers, "tokens": compared.tokens, "ties": len(compared.ties)},
            "told": told[: 2 * MOST_TOLD],
            "faults": [asdict(fault) for fault in faults],
            "samples": [asdict(sample) for sample in outcome.samples],
        }
        return Found(model=title, rows=rows, extra=extra)

    @property
    def _length(self) -> int:
        return PROMPT_LEN + self.max_tokens

    def _flags(self) -> list[str]:
        flags: dict[str, Any] = {
            "--dtype": self.dtype,
            "--max-model-len": self._length,
            "--max-num-seqs": self.seqs,
            # no prompt in two pieces, one that was preempted included
            "--max-num-batched-tokens": max(2048, self.seqs * self._length),
            "--kv-cache-memory-bytes": self.kv_mib << 20,
            "--generation-config": "vllm",
        }
        return ["--enforce-eager", *(str(part) for pair in flags.items() for part in pair)]

    def _configuration(self, history: Path) -> dict[str, Any]:
        own = {**self.spec_rollout}
        own["history"] = {"max_mib": 64, **own.get("history", {}), "dir": str(history)}
        # a mistake is told before a server is begun
        parse(own)
        return own

    @property
    def checked_share(self) -> float:
        """Of the requests that stay, as many as are to be compared."""
        return min(1.0, self.checked / max(1.0, self.duration_s * self.rate * (1.0 - self.leaving)))

    @property
    def sample_s(self) -> float:
        """From one sample to the next."""
        return max(5.0, self.duration_s / 720.0)

    def _planned(self) -> Sequence[Fault]:
        if not self.faults:
            return ()
        has_drafter = self.spec_rollout.get("placement", "coupled") != "coupled"
        return plan(self.seed, self.duration_s, [FULL, AWAY, STALL, *([KILL] if has_drafter else [])])

    def _compared(self, model: Path, outcome: Observations, session: Session) -> Comparison:
        report = session.display.steps(1)
        shape = {"seqs": self.seqs, "length": self._length, "width": 2 * self._length}
        with self.make_engines(model, report, environment=IN_ONE_PROCESS, **shape) as engines:
            engines.start(STOCK, generation_config="vllm", **JUDGE)
            counter = session.display.counter("answers compared")
            return compare(engines, outcome.kept, self.max_tokens, self.dtype, counter)

    def _checks(self, outcome: Observations, compared: Comparison, is_alive: bool) -> list[Row]:
        found = checks.memory(outcome.samples, self.settle_s, self.growth)
        found += checks.handles(outcome, self.settle_s)
        found.append(checks.disk(outcome.samples, self.disk_mib))
        found += checks.requests(outcome, is_alive)
        found += checks.drafting(outcome)
        found.append(checks.answers(compared))
        return found

    def title(self, found: Found) -> str:
        return f"{found.model}, {self.dtype}, {self.hours:g} hours"

    def told(self, found: Found) -> Iterable[Table | str]:
        return [Table(found.rows, SOAK), *found.extra["told"]]


bench_soak = command(SoakScenario)
