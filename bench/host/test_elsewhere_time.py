"""Host time of a step's drafts: from history in the engine, and from a drafter elsewhere, which is told and heard.

The second is what any drafter elsewhere costs the engine at least, however fast it drafts (ADR 23). Run:
`pytest bench/host/test_elsewhere_time.py --benchmark-only`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference.decoupled import VOCABULARY, FakeEngine, sampling, token_at
from vllm_specrollout._core import HistoryIndex
from vllm_specrollout.cluster.mail import MailClient, MailServer
from vllm_specrollout.cluster.serving import Serving
from vllm_specrollout.config.drafters import MAX_MATCHES, HistoryConfig
from vllm_specrollout.drafters.decoupled import DecoupledDrafter
from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.history.index_cache import IndexCache
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import Answer, DraftLimits, FinishReason, RequestBatch, RequestView

BATCHES = [1, 16, 64, 256]
NODES = 16
STEPS = 60
_PROMPT = 8


def _batch(batch: int, num_generated: int) -> RequestBatch:
    """Requests whose answers have so many tokens, and end some tokens after the last step."""
    left = 3 * STEPS + 64 - num_generated
    return RequestBatch.of(
        [
            RequestView(
                str(i),
                np.array([token_at(i, at) for at in range(_PROMPT + num_generated)], np.int32),
                _PROMPT,
                left,
                problem_id=str(i),
            )
            for i in range(batch)
        ]
    )


def _limits(batch: RequestBatch) -> DraftLimits:
    return DraftLimits(np.minimum(batch.max_nodes, NODES), batch.max_depth, batch.is_chain)


def _timed(benchmark: Any, batch: int, propose: Callable[..., Any], between: Callable[[int], None]) -> None:
    """Time `propose` as each request gains three tokens a step; what is between the steps is not timed."""
    grown = iter(range(STEPS + 1))

    def setup() -> tuple[tuple[RequestBatch, DraftLimits], dict[str, Any]]:
        step = next(grown)
        requests = _batch(batch, 3 * step)
        between(3 * step)
        return (requests, _limits(requests)), {}

    benchmark.extra_info["batch"] = batch
    benchmark.pedantic(propose, setup=setup, rounds=STEPS, warmup_rounds=1)


@pytest.mark.parametrize("batch", BATCHES)
def test_time_of_drafts_from_history(benchmark: Any, batch: int) -> None:
    """Each request's answer was given before, so that each step drafts."""

    def index() -> HistoryIndex:
        return HistoryIndex(min_match=config.min_match, max_match=config.max_match, max_matches=MAX_MATCHES)

    config = HistoryConfig()
    store = HistoryStore(config)
    cache: Any = IndexCache(config, store, index)
    drafter = HistoryDrafter(config, store=store, cache=cache)
    for i in range(batch):
        answer = np.array([token_at(i, at) for at in range(_PROMPT, _PROMPT + 3 * STEPS + 64)], np.int32)
        _ended(drafter, i, answer)
    drafter.begin_epoch()
    begun = _batch(batch, 0)
    for view in begun.views:
        drafter.admit(view)
    # indices are built on a thread of their own
    while cache.stats().building:
        time.sleep(0.001)
    drafter.propose(begun, _limits(begun))
    _timed(benchmark, batch, drafter.propose, lambda grown: None)
    assert drafter.hits > STEPS * batch // 2, "history has to draft for what it costs to be seen"
    drafter.close()


def _ended(drafter: HistoryDrafter, i: int, answer: np.ndarray) -> None:
    prompt = np.array([token_at(i, at) for at in range(_PROMPT)], np.int32)
    drafter.finish(Answer(f"earlier {i}", str(i), prompt, answer, FinishReason.FINISHED))


@pytest.mark.parametrize("batch", BATCHES)
def test_time_of_drafts_from_elsewhere(benchmark: Any, batch: int, tmp_path: Path) -> None:
    """The other end drafts between the steps, in the same thread: what is timed is to tell it, and to hear it."""
    office = MailServer(f"ipc://{tmp_path}/socket")
    drafter = DecoupledDrafter(sampling, 0, vocab_size=VOCABULARY)
    link = drafter.link("bench", MailClient(office.address))
    engine = FakeEngine(random.Random(0), max_requests=2 * batch)
    serving = Serving(engine, office)

    def between(grown: int) -> None:
        for _ in range(4):
            serving.turn()
        # what was sent is on its way for a moment
        time.sleep(0.002)

    while not link.is_there:
        serving.turn()
        drafter.receive()
    _timed(benchmark, batch, drafter.propose, between)
    nodes = link.counts.nodes
    assert nodes > STEPS * batch // 2, "drafts have to come for what they cost to be seen"
    benchmark.extra_info["nodes per request and step"] = round(nodes / (STEPS * batch), 1)
    drafter.close()
    office.close()
