"""A worker whose history drafter fails: what trainers hear of it, and what becomes of its files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.drafters import requests_of
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.drafter_config import HistoryConfig
from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.guard import Guard
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.types import FinishedRequest, FinishReason
from vllm_specrollout.worker import history_calls
from vllm_specrollout.worker.history_calls import TrainerMixin


def worker_of(speculator: Speculator) -> Any:
    worker = TrainerMixin.__new__(TrainerMixin)
    worker.model_runner = SimpleNamespace(spec_rollout=speculator)
    return worker


def ending(name: str) -> FinishedRequest:
    tokens = np.arange(8, dtype=np.int32)
    return FinishedRequest(name, "p", tokens[:2], tokens, FinishReason.FINISHED)


@pytest.fixture
def speculator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Speculator:
    monkeypatch.setattr(history_calls, "is_first_rank", lambda: True)
    drafter = HistoryDrafter(HistoryConfig(dir=str(tmp_path)))
    return Speculator([drafter], FixedBudget(8, 8), guard=Guard(is_strict=False))


def test_a_history_that_fails_now_and_then_goes_on_keeping_what_it_is_told(speculator, monkeypatch) -> None:
    worker = worker_of(speculator)
    speculator.finish(ending("a"))
    monkeypatch.setattr(speculator.drafters[0], "propose", lambda *_: 1 / 0)
    speculator.propose(requests_of(1), 0)
    assert speculator.drafters == []
    assert worker.spec_rollout_report_rewards([(["a"], 1.0)])["matched"] == 1
    assert worker.spec_rollout_begin_epoch(1) == 1
    assert worker.spec_rollout_history()["store"]["answers"] == 1
    assert worker.spec_rollout_health()["drafters"]["history"]["state"] == "probation"
    speculator.finish(ending("b"))
    monkeypatch.undo()
    assert not speculator.is_paused(65, 1)
    # what ended meanwhile is not lost
    assert worker.spec_rollout_history()["store"]["answers"] == 2
    speculator.drafters[0].close()


def test_a_history_that_is_given_up_is_closed_and_says_so(speculator, tmp_path: Path) -> None:
    worker, drafter = worker_of(speculator), speculator.drafters[0]
    speculator.finish(ending("a"))
    path = drafter.store._kept.folder.path
    speculator.drop(drafter, OSError("stale file handle"))
    speculator.close()
    for told in (
        worker.spec_rollout_report_rewards([(["a"], 1.0)]),
        worker.spec_rollout_begin_epoch(),
        worker.spec_rollout_history(),
    ):
        assert "stale file handle" in told["cause"] and told["hint"]
    assert worker.spec_rollout_health()["drafters"]["history"]["state"] == "given up"
    # another engine may have its file now, with all that was written
    heir = HistoryDrafter(HistoryConfig(dir=str(tmp_path)))
    assert heir.store._kept.folder.path == path and heir.store.stats().answers == 1
    heir.close()


def test_ranks_that_do_not_draft_say_nothing_of_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_calls, "is_first_rank", lambda: False)
    assert worker_of(Speculator([], FixedBudget(8, 8))).spec_rollout_health() == {}
