"""`specrollout bench curves`: recorded answers replayed at growing batches, on a model of any size, beside stock vLLM.

vLLM's trace replay has a model compute everything and then take a recorded token in the place of its own. So weights
are made up, and drafts are met as often as they were in the recorded rollouts. That needs vLLM's V2 runner: on a CPU it
is interpreted, which tells tokens a step and no time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm_specrollout.config import BUDGETS, MAX_NODES, SpecRolloutConfig
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.errors import SpecRolloutError, UnsupportedError
from vllm_specrollout.history.answers import MOST_TAIL
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import Answer, FinishReason

from ..gpu.machine import describe
from ..index.data import Data, Key, recorded
from ..runner.engines import IN_ONE_PROCESS, OURS, STOCK, Engines, sampling
from ..runner.fields import Row
from ..runner.interpreter import ENVIRONMENT as INTERPRETED
from ..runner.models import BARE, bare_model
from ..runner.report import Found, Table
from ..runner.results import CURVES
from ..runner.rows import UNTOLD, Pair, Run, make_row
from ..runner.scenario import EngineScenario, Session, command, flag

AGAIN = "stock again"
"""Stock beside itself, in every round: how far a ratio is from 1 by chance."""
_SAMPLES, _PAST, _DEFAULT = 16, 2, SpecRolloutConfig()


@dataclass(frozen=True, kw_only=True)
class Curves(EngineScenario):
    """Replay recorded answers at growing batches, stock and ours: tokens a step, step times, tokens a second."""

    bench: ClassVar[str] = "curves"

    model: str = flag("7B", "A shape of this size; its weights are made up.", choices=tuple(BARE))
    batches: tuple[int, ...] = flag((1, 8, 32, 64, 128, 256), "Requests at once.", "--batch", within=(1, 512))
    waves: int = flag(2, "Requests of a run, in batches; at least two problems' answers.", within=(1, 16))
    tokens: int = flag(256, "Most tokens of an answer; longer ones are cut there.", within=(2, 1024))
    max_draft_tokens: int = flag(_DEFAULT.max_draft_tokens, "Most draft tokens per step.", within=(1, MAX_NODES))
    budget: str = flag("auto", "`auto` drafts what pays; `fixed` as much as it may.", choices=BUDGETS)
    rounds: int = flag(3, "Timed rounds; the medians are reported.", within=(1, 100))
    is_interpreted: bool = flag(
        False, "On a CPU, by Triton's interpreter: tokens a step and no times.", "--interpreted"
    )

    def check(self) -> None:
        super().check()
        if not self.is_interpreted and describe()["gpu"] is None:
            cause = "no NVIDIA GPU can be seen, and vLLM replays recorded answers on its V2 runner alone"
            raise UnsupportedError(cause, "count tokens with `--interpreted --model tiny --budget fixed`")

    @property
    def length(self) -> int:
        """Most tokens of prompt and answer, with room for drafts."""
        return MOST_TAIL + self.tokens + self.max_draft_tokens

    def arguments(self) -> dict[str, Any]:
        """Of `vllm.LLM`, for both engines."""
        shape = BARE[self.model]
        return {
            "enable_trace_replay": True,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            # both share the device; each one's KV cache is set, so this only has to be free
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": (max(self.batches) + 1) * 2 * self.length * shape.layers * shape.token_bytes,
        }

    def measure(self, session: Session) -> Found:
        data, history = recorded(past=_PAST), session.scratch / "history"
        folder = bare_model(self.model, session.scratch / "model")
        self._remember(data, history)
        own = {
            **{"drafters": ["history", "ngram"], "budget": self.budget, "max_draft_tokens": self.max_draft_tokens},
            # rounds repeat each other, so every length would be known
            **{"queue_order": "arrival", "history": {"dir": str(history)}},
        }
        rounds = range(-1, 0 if self.is_interpreted else self.rounds)
        report = session.display.steps(2 + len(self.batches) * len(rounds))
        shape = {"seqs": max(self.batches), "length": self.length, "width": MOST_TAIL, "is_eager": self.is_interpreted}
        environment = {**IN_ONE_PROCESS, **INTERPRETED} if self.is_interpreted else {}
        with self.make_engines(folder, report, **shape, environment=environment) as engines:
            engines.start(STOCK, **self.arguments())
            engines.start(OURS, own, **self.arguments())
            engines.ask(OURS, "trainer", function="begin_epoch", epoch=_PAST)
            rows = self._rows(engines, data, rounds)
        return Found(model=f"weights made up, {self.model}", rows=rows)

    def _problems(self, batch: int) -> int:
        """How many problems' answers a run holds."""
        return max(2, -(-batch * self.waves // _SAMPLES))

    def _remember(self, data: Data, folder: Path) -> None:
        """Put the past epochs into a history, for every run under names of its own: no run knows another's answers."""
        tasks: list[Any] = []
        store = HistoryStore(HistoryConfig(dir=str(folder)), tasks.append)
        runs = [(batch, number) for batch in self.batches for number in range(-1, self.rounds)]
        for epoch in range(_PAST):
            store.begin_epoch(epoch)
            for name, problem in [
                (_problem(*run, p), one)
                for run in runs
                for p, one in enumerate(data.problems[: self._problems(run[0])])
            ]:
                past, tail = problem.past[epoch], problem.prompt[-MOST_TAIL:]
                for i, (ids, reward) in enumerate(zip(past.answers, past.rewards, strict=True)):
                    request = f"{name}/{epoch}/{i}"
                    store.append(Answer(request, name, tail, ids, FinishReason.FINISHED, 0, epoch=epoch, reward=reward))
        store.begin_epoch(_PAST)
        for task in tasks:
            task()
        store.close()

    def _rows(self, engines: Engines, data: Data, rounds: range) -> list[Row]:
        """Both rows of each batch; the first round is the warm-up, and the only one where nothing is timed."""
        arms = (OURS,) if self.is_interpreted else (AGAIN, OURS)

        def asked(batch: int) -> dict[Key, list[int]]:
            """Problem and answer -> the tokens to replay."""
            return {
                key: ids[: self.tokens].tolist() for key, ids in data.answers.items() if key[0] < self._problems(batch)
            }

        def run(batch: int, arm: str | None, number: int) -> Run:
            answers = asked(batch)
            prompts = [data.problems[p].prompt.tolist() for p, _ in answers]
            params = [
                sampling(i, len(ids), {"problem_id": _problem(batch, number, p)} if arm == OURS else None)
                | {"trace_decode_token_ids": ids}
                for i, ((p, _), ids) in enumerate(answers.items())
            ]
            arrivals = [max(0, i + 1 - batch) for i in range(len(params))]
            return engines.run(OURS if arm == OURS else STOCK, prompts, params, arrives_after=arrivals)

        pairs = engines.rounds(dict.fromkeys(self.batches, arms), rounds, run)
        for batch in self.batches:
            followed = zip(pairs[batch, OURS][-1].stock.token_ids, asked(batch).values(), strict=True)
            if any(ids != tuple(answer) for ids, answer in followed):
                cause = "stock vLLM did not follow the recorded answers"
                raise SpecRolloutError(cause, "see whether this vLLM replays traces")
        return [self._row(arm, batch, own) for (batch, arm), own in pairs.items()]

    def _row(self, arm: str, batch: int, pairs: list[Pair]) -> Row:
        """No speed of an interpreter's; and none unless all tokens were stock's, which are the recorded ones."""
        if self.is_interpreted:
            pairs = [Pair(stock=pair.stock, ours=pair.ours) for pair in pairs]
        row = make_row(arm, batch, self.max_draft_tokens, pairs)
        if self.is_interpreted or not row.identical:
            return row.but(**UNTOLD, step_ms=None, stock_ms=None)
        timed = [pair for pair in pairs if pair.is_timed]
        step_ms = statistics.median(ms for pair in timed for ms in pair.ours.step_ms())
        stock_ms = statistics.median(ms for pair in timed for ms in pair.stock.step_ms())
        return row.but(step_ms=step_ms, stock_ms=stock_ms)

    def title(self, found: Found) -> str:
        times = "; interpreted, so no time is told" if self.is_interpreted else ""
        return f"{found.model}, {self.dtype}, recorded answers of at most {self.tokens} tokens{times}"

    def told(self, found: Found) -> Iterator[Table | str]:
        yield Table(found.rows, CURVES)
        yield from (f"{row.name}, {row.batch} at once: {row.difference}" for row in found.rows if not row.identical)


def _problem(batch: int, number: int, problem: int) -> str:
    return f"{batch}/{number}/{problem}"


bench_curves = command(Curves)
