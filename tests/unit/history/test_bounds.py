"""What is kept per request, problem or answer has a bound, in memory and on disk; no error leaves answers behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.unit.history.stored import answers_in
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history import epochs, folder, keeping, log
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.epochs import EpochGuess
from vllm_specrollout.history.log import Reader
from vllm_specrollout.history.records import EpochRecord
from vllm_specrollout.history.stats import Outcome
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import FinishReason

MakeAnswer = Callable[..., Answer]


def _ask(store: HistoryStore, number: int, tokens: int = 30) -> None:
    """One problem that never comes back."""
    name, problem_id = f"r{number}", f"one-off-{number}"
    epoch = store.arrived(problem_id, name)
    ids = np.random.default_rng(number).integers(0, 150_000, tokens).astype(np.int32)
    store.append(Answer(problem_id, name, epoch, 0, FinishReason.FINISHED, ids, ids[:9]))


@pytest.mark.parametrize("where", ["in memory", "on disk"])
def test_problems_that_never_come_back_are_forgotten_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(keeping, "PER_MIB", 64)
    monkeypatch.setattr(epochs, "MOST_PROBLEMS", 50)
    store = HistoryStore(HistoryConfig(dir="" if where == "in memory" else str(tmp_path), max_mib=1))
    for number in range(1000):
        _ask(store, number)
        assert len(store._guess._seen) + len(store._guess._before) <= 50 and not store._guess._running
        assert len(store._requests) <= 65
        assert store.stats().answers <= 65 and store.stats().problems <= 65
    stats = store.stats()
    assert stats.evicted == 1000 - stats.answers and not stats.write_errors
    kept = [number for number in range(1000) if answers_in(store, f"one-off-{number}")]
    assert kept == list(range(1000 - stats.answers, 1000)) and len(kept) >= 60
    # names lead to their own answers, although rows are used again
    assert store.report_reward("r3", 1.0) is Outcome.UNKNOWN
    assert store.report_reward("r999", 1.0) is Outcome.RECORDED
    assert answers_in(store, "one-off-999")[0].reward == 1.0 and answers_in(store, "one-off-998")[0].reward is None


def test_files_stay_under_their_limit_without_any_epoch_and_keep_the_latest_answers(tmp_path: Path) -> None:
    store = HistoryStore(HistoryConfig(dir=str(tmp_path), max_disk_mib=1))
    peak = 0
    for number in range(1500):
        _ask(store, number, tokens=1000)
        peak = max(peak, sum(path.stat().st_size for path in tmp_path.iterdir()))
    stats = store.stats()
    assert 1 << 18 < stats.file_bytes < peak <= 1 << 20 and stats.evicted > 500 and not stats.memory_bytes
    assert stats.evicted + stats.answers == 1500 and answers_in(store, "one-off-1499")
    store.close()
    assert HistoryStore(HistoryConfig(dir=str(tmp_path))).stats().answers == stats.answers


def test_the_copy_of_a_file_written_anew_counts_towards_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HistoryStore(HistoryConfig(dir=str(tmp_path), max_disk_mib=1))
    sizes, rename = [], os.rename
    monkeypatch.setattr(
        os, "rename", lambda *args: (sizes.append(sum(p.stat().st_size for p in tmp_path.iterdir())), rename(*args))
    )
    for number in range(1500):
        _ask(store, number, tokens=1000)
    assert len(sizes) > 1 and max(sizes) <= 1 << 20


def test_a_problem_that_runs_is_not_forgotten() -> None:
    guess = EpochGuess()
    guess.arrived("long", "a")
    for number in range(epochs.MOST_PROBLEMS + 5):
        guess.arrived(f"p{number}", f"r{number}")
        guess.ended(f"r{number}")
    assert len(guess._seen) + len(guess._before) <= epochs.MOST_PROBLEMS + 1
    guess.ended("a")
    assert guess.arrived("long", "b")


def test_an_answer_longer_than_a_record_may_be_is_counted_and_hurts_nobody(
    tmp_path: Path, make_answer: MakeAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    monkeypatch.setattr("vllm_specrollout.history.tokens.MAX_TOKENS", 100)
    store.append(make_answer("long", count=101))
    store.append(make_answer("short"))
    assert [answer.request_id for answer in answers_in(store, "p")] == ["short"]
    assert store.stats().write_errors == 1 and store.report_reward("long", 1.0) is Outcome.UNKNOWN


def test_a_reward_that_is_reported_again_is_not_written_again(tmp_path: Path, make_answer: MakeAnswer) -> None:
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    store.append(make_answer("a"))
    store.report_reward("a", 1.0)
    size = store.stats().file_bytes
    assert [store.report_reward("a", 1.0) for _ in range(100)] == [Outcome.REPEATED] * 100
    assert store.stats().file_bytes == size
    store.report_reward("a", 2.0)
    assert store.stats().file_bytes > size


def test_rewards_count_as_dead_when_a_file_is_written_anew(
    tmp_path: Path, make_answer: MakeAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_LEAST_REWRITTEN", 0)
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    store.append(make_answer("a"))
    for number in range(1000):
        store.report_reward("a", number)
    before = store.stats().file_bytes
    store.begin_epoch()
    assert store.stats().file_bytes < before / 20 and answers_in(store, "p")[0].reward == 999.0


@pytest.mark.parametrize("error", [MemoryError("no memory"), ValueError("a mistake"), OSError(28, "No space left")])
def test_an_error_in_the_background_is_said_and_leaves_no_answer_behind(
    tmp_path: Path,
    make_answer: MakeAnswer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    monkeypatch.setattr(folder, "_LEAST_REWRITTEN", 0)
    config = HistoryConfig(dir=str(tmp_path), epochs=0)
    store = HistoryStore(config)
    store.append(make_answer("old"))

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(store._kept.folder, "rewrite", fail)
    store.begin_epoch(1)
    assert store.stats().write_errors == 1 and str(error) in caplog.text
    for name in "abc":
        store.append(make_answer(name, epoch=1))
    assert store.stats().memory_bytes == 0
    store.close()
    assert [answer.request_id for answer in answers_in(HistoryStore(config), "p")] == ["a", "b", "c"]


def test_answers_that_wait_for_a_disk_are_written_on_closing(
    tmp_path: Path, make_answer: MakeAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        store.append(make_answer("a"))
    assert store.stats().memory_bytes
    store.close()
    assert [answer.request_id for answer in answers_in(HistoryStore(HistoryConfig(dir=str(tmp_path))), "p")] == ["a"]


def test_an_epoch_that_begins_while_the_file_is_written_anew_is_written_too(
    tmp_path: Path, make_answer: MakeAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_LEAST_REWRITTEN", 0)
    tasks: list[Callable[[], None]] = []
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)), background=tasks.append)
    store.append(make_answer("a"))
    store.begin_epoch(5)
    rewrite = store._kept.folder.rewrite

    def meanwhile(epoch: int) -> object:
        store.begin_epoch(7)
        return rewrite(epoch)

    monkeypatch.setattr(store._kept.folder, "rewrite", meanwhile)
    # the answer is written, then the file anew
    for task in tasks[:2]:
        task()
    path = store._kept.folder.path
    assert EpochRecord(7) in [head for _, head in Reader(path).records()]
    store.close()
    assert HistoryStore(HistoryConfig(dir=str(tmp_path))).epoch == 7


def test_files_that_former_engines_left_are_removed_once_nothing_in_them_may_draft(
    tmp_path: Path, make_answer: MakeAnswer
) -> None:
    config = HistoryConfig(dir=str(tmp_path), epochs=1)
    engines = [HistoryStore(config) for _ in range(4)]
    for number, engine in enumerate(engines):
        engine.append(make_answer(f"a{number}"))
    for engine in engines[:3]:
        engine.close()
    named = tmp_path / "merged.history"
    named.write_bytes((tmp_path / "answers-0001.history").read_bytes())
    store = HistoryStore(config)
    assert len(log.files(tmp_path)) == 5
    store.begin_epoch(1)
    assert len(log.files(tmp_path)) == 5
    store.begin_epoch(2)
    # its own, that of an engine that runs, and what a person named
    assert [path.name for path in log.files(tmp_path)] == [
        "answers-0000.history", "answers-0003.history", "merged.history"
    ]  # fmt: skip
    assert store.stats().files == 3


def test_new_files_and_their_names_are_on_disk_before_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    HistoryStore(HistoryConfig(dir=str(tmp_path / "kept")))
    assert str(tmp_path / "kept") in synced and str(tmp_path / "kept" / "answers-0000.history") in synced
