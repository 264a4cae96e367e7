"""Forecast: what rollouts that are known already would have cost, plainly and with drafts, at given step times.

What belongs here: the product's own drafters, budget and queue over a dump's answers, epoch after epoch. Exact match
makes it possible: answers do not depend on drafts, so those of any engine are the ones that drafts would have met.

What it does not know is what a replay does not (simulate.py), and of drafters those that are models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from vllm_specrollout._core import HistoryIndex
from vllm_specrollout.budgets.fixed import OffBudget
from vllm_specrollout.budgets.registry import make_budget
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.config.drafters import MAX_MATCHES, HistoryConfig
from vllm_specrollout.drafters.base import Drafter
from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.drafters.ngram import NgramDrafter
from vllm_specrollout.errors import ConfigError, UnsupportedError, shown
from vllm_specrollout.history.index_cache import IndexCache
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.replay.anchors import ANCHORS
from vllm_specrollout.replay.cost import Cost, cost_of
from vllm_specrollout.replay.dump import DumpedRollout
from vllm_specrollout.replay.files import read_trace
from vllm_specrollout.replay.records import Arrival, End, Header
from vllm_specrollout.replay.requests import ReplayedRequest
from vllm_specrollout.replay.simulate import AskingClock, Replay, Result
from vllm_specrollout.scheduling.longest_first import Queue
from vllm_specrollout.types import DraftLimits, FinishReason, RequestBatch, RequestView, TreeBatch

_IN_A_STEP = 8192
"""Rows that an engine computes in one step; more only where every request's prompt needs it."""
_BLOCK = 16
"""Tokens of a prompt that a later sample computes again: what is left of its last block, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What steps take, and where."""

    name: str
    told: str
    cost: Cost
    # the model runner: it decides how late budgets learn what a step cost
    runner: Literal["v1", "v2"] = "v2"


def step_times(name: str) -> StepTimes:
    """Of an anchor, or fitted to the steps of a recorded trace.

    Raises:
        ConfigError: the name is neither an anchor's nor a file's.
        TraceError: the file is no trace, or too few of its steps were timed.
    """
    if (anchor := ANCHORS.get(name)) is not None:
        return StepTimes(name=name, told=anchor.told, cost=anchor.steps)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"`--steps` is {shown(name)}, which is neither an anchor nor a file",
            f"name one of {', '.join(ANCHORS)}, or a trace that your engine recorded",
        )
    trace = read_trace(path)
    told = f"the steps of {trace.header.model or 'an engine'} in {path.name}, {trace.header.max_num_seqs} at once"
    # rows of prompts are those that are computed, here and there
    cost = msgspec.structs.replace(cost_of(trace), prompt_share=1.0)
    return StepTimes(name=path.name, told=told, cost=cost, runner=trace.header.runner)


@dataclass(frozen=True, slots=True)
class EpochForecast:
    """What became of the answers of one epoch."""

    epoch: int
    num_answers: int
    num_tokens: int
    # milliseconds and steps of its rollouts together
    plain_ms: float
    plain_steps: int
    ours_ms: float
    ours_steps: int
    # of decode steps: tokens that a running request yielded in one
    tokens_per_step: float
    drafted: int
    accepted: int

    @property
    def speedup(self) -> float:
        return self.plain_ms / self.ours_ms


def forecast(
    rollouts: Sequence[DumpedRollout], config: SpecRolloutConfig, times: StepTimes, batch: int, seed: int = 0
) -> list[EpochForecast]:
    """Each epoch of the rollouts, decoded plainly and with drafts. Deterministic.

    Args:
        config: of the engine that drafts; its folders and its archive are left alone.
        batch: requests at once.

    Raises:
        UnsupportedError: the configuration has drafts made by a model, or by a class of the user's.
    """
    cost = times.cost
    asking, off = AskingClock(cost), AskingClock(cost)
    widest = max(len(one.prompt) for rollout in rollouts for one in rollout.answers)
    header = Header(
        runner=times.runner,
        max_num_seqs=batch,
        max_num_batched_tokens=max(_IN_A_STEP, batch + widest),
        max_draft_tokens=config.max_draft_tokens,
        max_depth=config.max_depth,
    )
    order = Queue() if config.queue_order == "longest_first" else None
    drafters = list(_drafters(config, asking.spend))
    ours = Replay(header, cost, asking, drafters, make_budget(config, seed=seed), order)
    plain = Replay(header, cost, off, [], OffBudget())
    found: dict[int, list[tuple[DumpedRollout, Result, Result]]] = {}
    for number, rollout in enumerate(rollouts):
        both = (plain.run(list(_requests(rollout, number))), ours.run(list(_requests(rollout, number))))
        found.setdefault(rollout.epoch, []).append((rollout, *both))
    for drafter in drafters:
        drafter.close()
    return [_summed(epoch, runs) for epoch, runs in found.items()]


def _summed(epoch: int, runs: Sequence[tuple[DumpedRollout, Result, Result]]) -> EpochForecast:
    answers = [one.answer for rollout, _, _ in runs for one in rollout.answers]
    plain, ours = [one for _, one, _ in runs], [one for _, _, one in runs]
    yielded, asked = sum(one.decode_tokens for one in ours), sum(one.request_steps for one in ours)
    return EpochForecast(
        epoch=epoch,
        num_answers=len(answers),
        num_tokens=sum(map(len, answers)),
        plain_ms=sum(one.makespan_ms for one in plain),
        plain_steps=sum(one.steps for one in plain),
        ours_ms=sum(one.makespan_ms for one in ours),
        ours_steps=sum(one.steps for one in ours),
        tokens_per_step=yielded / asked if asked else 1.0,
        drafted=sum(one.drafted for one in ours),
        accepted=sum(one.accepted for one in ours),
    )


def _requests(rollout: DumpedRollout, number: int) -> Iterable[ReplayedRequest]:
    """All there at once; a prompt is computed for its first sample, and its blocks serve the others."""
    longest, known = max(len(one.answer) for one in rollout.answers), set[bytes]()
    for i, one in enumerate(rollout.answers):
        prompt, name = len(one.prompt), f"{number}/{i}"
        arrival = Arrival(request=i, step=0, num_prompt_tokens=prompt, max_tokens=longest, problem_id=one.problem_id)
        end = End(request=i, status=FinishReason.FINISHED.value, token_ids=one.answer.tolist())
        token_ids = np.concatenate([one.prompt, one.answer])
        view = RequestView(name, token_ids[:prompt], prompt, longest, problem_id=one.problem_id, name=name)
        again = one.prompt.tobytes() in known
        known.add(one.prompt.tobytes())
        yield ReplayedRequest(arrival, end, token_ids, view, min(prompt, _BLOCK) if again else prompt)


# --- drafters whose asking takes simulated time -----------------------------------------------------------------------


class _Charged:
    """In front of a drafter: to ask it is to spend time."""

    spend: Callable[[int], None]

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        self.spend(batch.size)
        trees: TreeBatch = super().propose(batch, limits)  # type: ignore[misc]
        return trees


class _Builds(Executor):
    """Builds indices before the next drafts: an engine's thread has them ready while prompts are computed."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], object]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._waiting.append(partial(fn, *args, **kwargs))
        return Future()

    def run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for build in waiting:
            build()


class _Ngram(_Charged, NgramDrafter):
    pass


class _History(_Charged, HistoryDrafter):
    def __init__(self, config: HistoryConfig, max_nodes: int, source: int) -> None:
        own, self._builds = replace(config, dir="", url=""), _Builds()
        store = HistoryStore(own)
        bounds = {name: getattr(own, name) for name in ("min_match", "max_match")}
        cache = IndexCache(own, store, partial(HistoryIndex, max_matches=MAX_MATCHES, **bounds), self._builds)
        super().__init__(own, max_nodes, source, store=store, cache=cache)

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        self._builds.run()
        return super().propose(batch, limits)


def _drafters(config: SpecRolloutConfig, spend: Callable[[int], None]) -> Iterable[Drafter]:
    """Those of the configuration, as the engine has them."""
    if config.speculative_config is not None or config.placement != "coupled":
        raise UnsupportedError(
            "`speculative_config` has a model draft, and without an engine no model runs",
            "leave it out: `history` and `ngram` need none; or run `specrollout try MODEL --prompts FILE`",
        )
    for source, name in enumerate(config.drafters):
        made: _History | _Ngram
        if name == "history":
            made = _History(config.history, config.max_draft_tokens, source)
        elif name == "ngram":
            made = _Ngram(config.ngram, config.max_draft_tokens, source)
        else:
            raise UnsupportedError(
                f"`drafters` names `{name}`, and a forecast has `history` and `ngram` alone", "leave it out"
            )
        made.spend = spend
        yield made
