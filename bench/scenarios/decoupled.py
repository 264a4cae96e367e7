"""`specrollout bench decoupled`: a model that drafts in the target's own steps, and beside them on cores of its own."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_specrollout.bench.policy import DRAFT
from vllm_specrollout.bench.policy.reward import problems

from vllm_specrollout.types import MOST_NODES

from ..runner.engines import IN_ONE_PROCESS, PROMPT_LEN, STOCK, Engines, sampling
from ..runner.fields import Row
from ..runner.models import find_model, quarter_drafter
from ..runner.report import Found, Table
from ..runner.results import DECOUPLED as COLUMNS
from ..runner.rows import Pair, Run, difference_of, quartiles
from ..runner.scenario import RoundsScenario, Session, command, flag

PLAIN, COUPLED, DECOUPLED = "plain", "coupled", "decoupled"
_ARMS = (COUPLED, DECOUPLED)
QUARTER, SMALL = "quarter", "small"


@dataclass(frozen=True, kw_only=True)
class Decoupled(RoundsScenario):
    """Compare a model that drafts in the target's own steps with one that drafts beside them, on cores of its own."""

    bench: ClassVar[str] = "decoupled"

    size: str = flag("150M", "The policy's cost: that of a model of 30M, 150M or 400M.")
    drafters: tuple[str, ...] = flag(
        (QUARTER, SMALL), "A quarter of the target's cost, or as small as it is.", choices=(QUARTER, SMALL)
    )
    device: str = flag("cpu:1", "Cores that the drafter has to itself, as in `devices`.")
    batches: tuple[int, ...] = flag((1, 2), "Requests at once.", "--batch", within=(1, 64))
    windows: tuple[int, ...] = flag((2, 4, 8), "Tokens of a draft window.", "--window", within=(1, 16))
    fan_out: int = flag(4, "Choices that a decoupled drafter sends for each position.", within=(1, 8))
    requests: int = flag(6, "Requests of each run, at least one batch.", within=(1, 1000))
    max_tokens: int = flag(160, "Tokens after which an answer is cut.", within=(2, 1 << 16))

    def measure(self, session: Session) -> Found:
        folder, title = find_model(None, self.size, self.dtype, self.cache, session.display, is_policy=True)
        cells = [(batch, window) for batch in self.batches for window in self.windows]
        report = session.display.steps(1 + len(self.drafters) * (len(_ARMS) + len(cells) * (self.rounds + 1)))
        shape = {"seqs": max(self.batches), "length": PROMPT_LEN + self.max_tokens, "width": 2 * PROMPT_LEN}
        rows: list[Row] = []
        with self.make_engines(folder, report, environment=IN_ONE_PROCESS, **shape) as engines:
            engines.start(STOCK)
            prompts = engines.encode(problems(self.requests, self.seed))
            for drafter in self.drafters:
                self._start(engines, str(quarter_drafter(self.size, self.cache) if drafter == QUARTER else DRAFT))

                def run(cell: tuple[int, int], arm: str | None, number: int) -> Run:
                    return self._run(engines, prompts, arm, *cell)

                pairs = engines.rounds(dict.fromkeys(cells, _ARMS), range(-1, self.rounds), run)
                rows += [self._row(drafter, *cell, {arm: pairs[cell, arm] for arm in _ARMS}) for cell in cells]
                # those of all drafters, and the drafters' processes, are too many for 24 GB
                for arm in _ARMS:
                    engines.stop(arm)
        return Found(model=title, rows=rows)

    def _start(self, engines: Engines, model: str) -> None:
        """Both engines of a drafter."""
        deepest = max(self.windows)
        own = {
            "drafters": [],
            "budget": "fixed",
            "max_draft_tokens": most_drafts(deepest),
            "max_depth": deepest,
            "queue_order": "arrival",
            "speculative_config": {"method": "draft_model", "model": model, "num_speculative_tokens": deepest},
        }
        engines.start(COUPLED, own)
        streams: dict[str, Any] = {"window": deepest, "fan_out": self.fan_out}
        engines.start(DECOUPLED, {**own, "devices": [self.device], "decoupled": streams, "placement": DECOUPLED})

    def _run(self, engines: Engines, prompts: list[list[int]], arm: str | None, batch: int, window: int) -> Run:
        """All requests, so many at once; arm None: stock."""
        if arm is not None:
            limits = {"max_draft_tokens": most_drafts(window), "max_depth": window}
            engines.tell(arm, "set_budget", name="fixed", **limits)
        if arm == DECOUPLED:
            engines.tell(arm, "set_window", window=window)
        # one comes when one has ended: a batch of the longest answers alone would say more of them than of the others
        arrivals = [max(0, i - batch + 1) for i in range(len(prompts))]
        options = None if arm is None else {}
        params = [sampling(self.seed + i, self.max_tokens, options) for i in range(self.requests)]
        return engines.run(arm or STOCK, prompts, params, arrives_after=arrivals)

    def _row(self, drafter: str, batch: int, window: int, pairs: Mapping[str, Sequence[Pair]]) -> Row:
        """One setting; stock's speeds are those beside the first arm."""
        wrong = difference_of([pair for own in pairs.values() for pair in own])
        timed = {arm: [pair for pair in own if pair.is_timed] for arm, own in pairs.items()}
        ways, told = {arm: _way(own, wrong is None) for arm, own in timed.items()}, {}
        if wrong is None:
            stock = [pair.stock.num_tokens / pair.stock.wall_s for pair in timed[COUPLED]]
            typical = statistics.median(stock)
            told = {"stock_tokens_per_s": typical, "stock_quartiles": quartiles([one / typical for one in stock])}
            speeds = {PLAIN: 1.0, **{arm: ways[arm]["speedup"] for arm in _ARMS}}
            told["fastest"] = max(speeds, key=speeds.__getitem__)
        shared: dict[str, Any] = {"identical": wrong is None, "difference": wrong, "ways": ways}
        return Row(drafter=drafter, batch=batch, window=window, **shared, **told)

    def title(self, found: Found) -> str:
        return f"{found.model}, {self.dtype}: times plain decoding"

    def told(self, found: Found) -> Iterator[Table | str]:
        yield Table(found.rows, COLUMNS)
        for row in found.rows:
            if row.difference is not None:
                yield f"{row.drafter}, batch {row.batch}, window {row.window}: {row.difference}"


def _way(pairs: Sequence[Pair], is_told: bool) -> dict[str, Any]:
    """One way to draft in one setting: times plain decoding, and its quartiles over rounds."""
    speeds, last = [pair.stock.wall_s / pair.ours.wall_s for pair in pairs], pairs[-1].ours
    return {
        "speedup": statistics.median(speeds) if is_told else None,
        "quartiles": quartiles(speeds) if is_told else None,
        "tokens_per_step": 1.0 if last.totals is None else last.num_tokens / last.totals.request_steps,
    }


def most_drafts(window: int) -> int:
    """Nodes of a request that are verified, either way: a model's comb has two choices at each level."""
    return min(2 * window, MOST_NODES)


bench_decoupled = command(Decoupled)
