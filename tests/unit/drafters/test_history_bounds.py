import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.drafters import ask
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.types import Answer, FinishReason, RequestView

PROMPT, ANSWER, PROBLEMS = 30, 30, 900
"""Tokens, of which nothing of one problem is in another; and more problems than answers are kept for in 1 MiB."""


def ask_once(drafter: HistoryDrafter, number: int, tokens: np.ndarray) -> None:
    """A request that is admitted, drafted for on its way, and over."""
    request, problem = f"chatcmpl-{number:032x}-{number:08x}", f"{number * 7919:024x}"
    view = RequestView(request, tokens[:PROMPT], PROMPT, 100, problem_id=problem, name=request[:-9])
    drafter.admit(view)
    while drafter.cache.get(problem) is None:  # built by a thread, while an engine decodes
        time.sleep(1e-4)
    ask(drafter, [replace(view, token_ids=tokens[: PROMPT + ANSWER // 2])], 8, 8)
    drafter.finish(Answer(request, problem, tokens[:PROMPT], tokens[PROMPT:], FinishReason.FINISHED, 0, view.name))
    drafter.forget(request)


@pytest.mark.parametrize("where", ["in memory", "on disk"])
def test_answers_and_indices_of_problems_asked_once_stay_within_their_limit(tmp_path: Path, where: str) -> None:
    drafter = HistoryDrafter(HistoryConfig(dir="" if where == "in memory" else str(tmp_path), max_mib=1))
    rng = np.random.default_rng(0)
    try:
        for number in range(PROBLEMS):
            ask_once(drafter, number, rng.integers(0, 150_000, PROMPT + ANSWER).astype(np.int32))
        patience = time.monotonic() + 60.0
        # what is written, and then what there is no room for, is a thread's work
        store, cache = drafter.store.stats(), drafter.cache.stats()
        while (cache.building or store.waiting or store.answers > 768) and time.monotonic() < patience:
            time.sleep(1e-4)
            store, cache = drafter.store.stats(), drafter.cache.stats()
        # 768 answers, of which some go at once; 128 indices, and one that is being asked
        assert 700 <= store.answers <= 768 and store.evicted == PROBLEMS - store.answers
        assert 0 < cache.indices <= 129 and cache.num_bytes <= 1 << 20
        assert not drafter._live
    finally:
        drafter.close()
