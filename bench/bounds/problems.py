"""Problems that never come back, through the history drafter as an engine drives it. A process of its own measures."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.types import DraftLimits, FinishedRequest, FinishReason, RequestBatch, RequestView

from .memory import rss_mib

PROMPT, ANSWER, VOCABULARY = 30, 30, 150_000
"""Tokens, as an engine with short chats has them; nothing of one is in another, so nothing can be shared."""
_AT_ONCE = 200
"""Requests after which the threads may catch up: an engine decodes meanwhile, this does not."""
_PAUSE_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What there was after so many problems."""

    problems: int
    rss_mib: float
    # answers known, and answers dropped for the limits
    answers: int
    evicted: int
    indices: int
    index_mib: float
    disk_mib: float


def ask_each_once(folder: str, max_mib: int, max_disk_mib: int, sampled: list[int]) -> list[Held]:
    """What is held after so many problems, in order.

    Args:
        folder: `history.dir`; empty: answers are kept in memory.
        max_mib: 0: the default.
    """
    limits = {"max_mib": max_mib} if max_mib else {}
    drafter = HistoryDrafter(HistoryConfig(dir=folder, max_disk_mib=max_disk_mib, **limits))
    rng = np.random.default_rng(0)
    found: list[Held] = []
    try:
        for number in range(1, max(sampled) + 1):
            _ask(drafter, number, rng.integers(0, VOCABULARY, PROMPT + ANSWER).astype(np.int32))
            if number % _AT_ONCE == 0 or number in sampled:
                _catch_up(drafter)
            if number in sampled:
                found.append(_held(drafter, number, folder))
    finally:
        drafter.close()
    return found


def _ask(drafter: HistoryDrafter, number: int, tokens: np.ndarray) -> None:
    """One request: admitted, drafted for once on its way, finished."""
    # as long as a server's and a problem's own
    request, problem = f"chatcmpl-{number:032x}-{number:08x}", f"{number * 7919:024x}"
    name = request[:-9]
    drafter.admit(RequestView(request, tokens[:PROMPT], PROMPT, 100, problem_id=problem, name=name))
    while drafter.cache.get(problem) is None:  # built by a thread, while an engine decodes
        time.sleep(_PAUSE_S)
    view = RequestView(request, tokens[: PROMPT + ANSWER // 2], PROMPT, 100, problem_id=problem, name=name)
    batch = RequestBatch.of([view])
    drafter.propose(batch, DraftLimits(batch.max_nodes.clip(max=8), batch.max_depth.clip(max=8), batch.is_chain))
    ended = FinishReason.FINISHED
    drafter.finish(FinishedRequest(request, problem, tokens[:PROMPT], tokens[PROMPT:], ended, 0, name))
    drafter.forget(request)


def _catch_up(drafter: HistoryDrafter) -> None:
    while drafter.cache.stats().building or drafter.store.stats().waiting and drafter.store.stats().files:
        time.sleep(_PAUSE_S)


def _held(drafter: HistoryDrafter, number: int, folder: str) -> Held:
    store, cache = drafter.store.stats(), drafter.cache.stats()
    return Held(
        problems=number,
        rss_mib=rss_mib(),
        answers=store.answers,
        evicted=store.evicted,
        indices=cache.indices,
        index_mib=cache.num_bytes / 2**20,
        disk_mib=sum(path.stat().st_size for path in Path(folder).iterdir()) / 2**20 if folder else 0.0,
    )
