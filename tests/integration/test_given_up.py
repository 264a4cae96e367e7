"""A worker whose history drafter fails: what trainers hear of it, and what becomes of its files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.runner.oracle import OracleDrafter
from bench.runner.tuning import Tuning
from tests.drafters import ask, requests_of
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.config.drafters import HistoryConfig, NgramConfig
from vllm_specrollout.drafters.base import Place
from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.drafters.ngram import NgramDrafter
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.types import Answer, FinishReason, RequestView
from vllm_specrollout.worker import calls
from vllm_specrollout.worker.calls import TrainerMixin


class Stock:
    """vLLM's worker, at its end."""

    has_stopped = False

    def shutdown(self) -> None:
        self.has_stopped = True


class Worker(TrainerMixin, Stock):  # type: ignore[misc]
    """Ours over it."""

    def __init__(self, speculator: Speculator, *unfinished: Answer, remote: Any = None) -> None:
        own = {"spec_rollout": speculator, "metrics": SimpleNamespace(trainer={})}
        self.model_runner = SimpleNamespace(**own, unfinished=lambda: unfinished, remote=remote)


def ending(name: str) -> Answer:
    tokens = np.arange(8, dtype=np.int32)
    return Answer(name, "p", tokens[:2], tokens, FinishReason.FINISHED)


@pytest.fixture
def speculator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Speculator:
    monkeypatch.setattr(calls, "is_first_rank", lambda: True)
    drafter = HistoryDrafter(HistoryConfig(dir=str(tmp_path)))
    return Speculator([drafter], FixedBudget(8, 8), guard=Guard(is_strict=False))


def test_a_history_that_fails_now_and_then_goes_on_keeping_what_it_is_told(speculator, monkeypatch) -> None:
    worker = Worker(speculator)
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
    worker, drafter = Worker(speculator), speculator.drafters[0]
    speculator.finish(ending("a"))
    path = drafter.store._folder.own.path
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
    assert heir.store._folder.own.path == path and heir.store.stats().answers == 1
    heir.close()


def test_what_ended_while_a_history_was_on_probation_is_on_disk_when_the_engine_ends(
    speculator, tmp_path: Path, monkeypatch
) -> None:
    drafter = speculator.drafters[0]
    monkeypatch.setattr(drafter, "propose", lambda *_: 1 / 0)
    speculator.propose(requests_of(1), 0)
    speculator.finish(ending("a"))
    worker = Worker(speculator, ending("b"))
    worker.shutdown()
    assert worker.has_stopped
    heir = HistoryDrafter(HistoryConfig(dir=str(tmp_path)))
    assert heir.store.stats().answers == 2
    heir.close()


def test_an_engine_ends_whatever_fails_at_its_end(speculator, monkeypatch) -> None:
    history = speculator.drafters[0]
    monkeypatch.setattr(history, "propose", lambda *_: 1 / 0)
    speculator.propose(requests_of(1), 0)
    monkeypatch.setattr(history, "finish", lambda ending: 1 / 0)
    monkeypatch.setattr(history, "close", lambda: 1 / 0)
    worker = Worker(speculator, ending("b"), remote=SimpleNamespace(close=lambda: 1 / 0))
    worker.shutdown()
    assert worker.has_stopped
    assert speculator.guard.failures == {"drafter history": 2, "closing": 2}
    monkeypatch.undo()
    history.close()


def test_a_history_that_takes_the_place_of_one_that_was_given_up_is_asked(speculator, tmp_path: Path) -> None:
    worker = Worker(speculator)
    speculator.drop(speculator.drafters[0], OSError("stale file handle"))
    assert "cause" in worker.spec_rollout_history()
    heir = HistoryDrafter(HistoryConfig())
    speculator.replace_drafters([heir])
    assert "cause" not in worker.spec_rollout_history() and worker.spec_rollout_begin_epoch(3) == 3
    assert worker.spec_rollout_health()["drafters"]["history"]["state"] == "alive"
    heir.close()


class _Tunes(Tuning):
    def __init__(self, speculator: Speculator) -> None:
        self.model_runner = SimpleNamespace(spec_rollout=speculator)
        model = SimpleNamespace(get_vocab_size=lambda: 64)
        self.vllm_config = SimpleNamespace(model_config=model)


def test_another_recording_leaves_the_drafters_what_they_were(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    path.write_text('{"p": [1, 2, 3]}', encoding="utf-8")
    oracle = OracleDrafter(Place(1, 8, 64), path=str(path))
    given = [HistoryDrafter(HistoryConfig()), oracle, NgramDrafter(NgramConfig(), 8, 2)]
    speculator = Speculator(given, FixedBudget(8, 8), guard=Guard(is_strict=False))
    worker = _Tunes(speculator)
    for tokens in ([4, 5], [6]):
        path.write_text(json.dumps({"p": tokens}), encoding="utf-8")
        worker.spec_rollout_set_oracle(str(path), [1.0])
        (tree,) = ask(oracle, [RequestView("r", np.zeros(1, np.int32), 1, 50, problem_id="p")])
        assert tree.token_ids.tolist() == tokens and speculator.all_drafters() == given


def test_ranks_that_do_not_draft_say_nothing_of_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "is_first_rank", lambda: False)
    assert Worker(Speculator([], FixedBudget(8, 8))).spec_rollout_health() == {}
