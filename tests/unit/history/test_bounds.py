"""What is kept per request, problem or answer has a bound, in memory and on disk; no error leaves answers behind."""

import os

import numpy as np
import pytest

from tests.unit.history.poisoned import filled
from tests.unit.history.stored import answers_in, names
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history import epochs, store
from vllm_specrollout.history.answers import RewardOutcome
from vllm_specrollout.history.database import Database, files
from vllm_specrollout.history.epochs import EpochGuess
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import Answer, FinishReason


def _ask(store: HistoryStore, number: int, tokens: int = 30) -> None:
    """One problem that never comes back."""
    name, problem_id = f"r{number}", f"one-off-{number}"
    epoch = store.arrived(problem_id, name)
    ids = np.random.default_rng(number).integers(0, 150_000, tokens).astype(np.int32)
    store.append(Answer(name, problem_id, ids[:9], ids, FinishReason.FINISHED, 0, epoch=epoch))


@pytest.mark.parametrize("where", ["in memory", "on disk"])
def test_problems_that_never_come_back_are_forgotten_the_oldest_first(tmp_path, monkeypatch, where):
    monkeypatch.setattr(store, "PER_MIB", 64)
    monkeypatch.setattr(epochs, "MOST_PROBLEMS", 50)
    kept = HistoryStore(HistoryConfig(dir="" if where == "in memory" else str(tmp_path), max_mib=1))
    for number in range(500):
        _ask(kept, number)
        assert len(kept._guess._seen) + len(kept._guess._before) <= 50 and not kept._guess._running
        assert len(kept._requests) <= 65 and not kept._waiting and not kept._due
        assert kept.stats().answers <= 65 and kept.stats().problems <= 65
    stats = kept.stats()
    assert stats.evicted == 500 - stats.answers and not stats.write_errors
    found = [number for number in range(500) if answers_in(kept, f"one-off-{number}")]
    assert found == list(range(500 - stats.answers, 500)) and len(found) >= 60
    assert kept.report_reward("r3", 1.0) is RewardOutcome.UNKNOWN
    assert kept.report_reward("r499", 1.0) is RewardOutcome.RECORDED
    assert answers_in(kept, "one-off-499")[0].reward == 1.0 and answers_in(kept, "one-off-498")[0].reward is None


def test_files_stay_under_their_limit_without_any_epoch_and_keep_the_latest_answers(tmp_path):
    kept, peak = HistoryStore(HistoryConfig(dir=str(tmp_path), max_disk_mib=1)), 0
    for number in range(1000):
        _ask(kept, number, tokens=1000)
        peak = max(peak, sum(path.stat().st_size for path in tmp_path.iterdir()))
    stats = kept.stats()
    assert 1 << 18 < stats.file_bytes < peak <= 1 << 20 and stats.evicted > 500 and not stats.waiting
    assert stats.evicted + stats.answers == 1000 and answers_in(kept, "one-off-999")
    kept.close()
    assert HistoryStore(HistoryConfig(dir=str(tmp_path))).stats().answers == stats.answers


def test_a_file_gives_back_what_a_lower_limit_or_a_later_epoch_leaves_unused(tmp_path):
    kept = HistoryStore(HistoryConfig(dir=str(tmp_path), epochs=0))
    for number in range(1000):
        _ask(kept, number, tokens=1000)
    kept.close()
    (path,) = tmp_path.glob("*.history")
    size = path.stat().st_size
    low = HistoryStore(HistoryConfig(dir=str(tmp_path), epochs=0, max_disk_mib=2))
    assert low.stats().answers < 600 and low.stats().evicted == 1000 - low.stats().answers
    low.begin_epoch()
    low.close()
    assert path.stat().st_size < size / 20


def test_a_token_takes_about_two_bytes_at_rest(tmp_path):
    kept, rng = HistoryStore(HistoryConfig(dir=str(tmp_path))), np.random.default_rng(0)
    for number in range(400):
        # some are common, as in any text
        ids = np.minimum(rng.zipf(1.3, 1000) - 1, 150_000).astype(np.int32)
        kept.append(Answer(f"cmpl-{number:032d}", f"{number // 8:024d}", ids[:64], ids, FinishReason.FINISHED, 0))
    kept.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) / 400_000 <= 2.2


def test_a_problem_that_runs_is_not_forgotten():
    guess = EpochGuess()
    guess.arrived("long", "a")
    for number in range(epochs.MOST_PROBLEMS + 5):
        guess.arrived(f"p{number}", f"r{number}")
        guess.ended(f"r{number}")
    assert len(guess._seen) + len(guess._before) <= epochs.MOST_PROBLEMS + 1
    guess.ended("a")
    assert guess.arrived("long", "b")


@pytest.mark.parametrize("change", [{"count": 101}, {"weights_version": 1 << 63}], ids=["tokens", "version"])
def test_an_answer_that_no_row_can_hold_is_counted_and_hurts_nobody(tmp_path, make_answer, monkeypatch, change):
    kept = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    monkeypatch.setattr("vllm_specrollout.history.tokens.MAX_TOKENS", 100)
    kept.append(make_answer("long", **change))
    kept.append(make_answer("short"))
    assert names(kept) == ["short"]
    assert kept.stats().write_errors == 1 and kept.report_reward("long", 1.0) is RewardOutcome.UNKNOWN


def test_rewards_take_no_room_however_often_they_are_reported(tmp_path, make_answer):
    kept = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    kept.append(make_answer("a"))
    for number in range(1000):
        kept.report_reward("a", number)
    assert kept.report_reward("a", 999) is RewardOutcome.REPEATED and not kept._due
    kept.close()
    assert (tmp_path / "answers-0000.history").stat().st_size < 10_000
    assert answers_in(HistoryStore(HistoryConfig(dir=str(tmp_path))), "p")[0].reward == 999.0


@pytest.mark.parametrize("error", [MemoryError("no memory"), ValueError("a mistake"), OSError(28, "No space left")])
@pytest.mark.parametrize("step", ["sync", "drop_before", "give_back", "counts"])
def test_an_error_in_the_background_is_said_and_leaves_no_answer_behind(
    tmp_path, make_answer, monkeypatch, caplog, step, error
):
    config = HistoryConfig(dir=str(tmp_path), epochs=0)
    kept = HistoryStore(config)
    kept.append(make_answer("old"))

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Database, step, fail)
        kept.begin_epoch(1)
        assert kept.stats().write_errors >= 1 and str(error) in caplog.text
        for name in "abc":
            kept.append(make_answer(name, epoch=1))
        assert kept.stats().waiting == 0
    kept.close()
    assert names(HistoryStore(config)) == ["a", "b", "c"]


def test_files_that_former_engines_left_are_removed_once_nothing_in_them_may_draft(tmp_path, make_answer):
    config = HistoryConfig(dir=str(tmp_path), epochs=1)
    engines = [HistoryStore(config) for _ in range(4)]
    for number, engine in enumerate(engines):
        engine.append(make_answer(f"a{number}"))
    for engine in engines[:3]:
        engine.close()
    filled(tmp_path / "merged.history", make_answer("m"))
    kept = HistoryStore(config)
    assert len(files(tmp_path)) == 5
    kept.append(make_answer("b", epoch=kept.begin_epoch(1)))
    assert len(files(tmp_path)) == 5
    kept.begin_epoch(2)
    # its own, that of an engine that runs, and what a person named
    left = [f"{name}.history" for name in ("answers-0000", "answers-0003", "merged")]
    assert [path.name for path in files(tmp_path)] == left
    assert kept.stats().files == 3 and not list(tmp_path.glob("answers-0001*"))


def test_files_that_former_engines_left_make_room_for_those_of_this_one_the_oldest_first(tmp_path, make_answer):
    for number in range(1, 5):
        answers = (make_answer(f"{number}-{one}", count=20_000) for one in range(10))
        path = filled(tmp_path / f"answers-{number:04d}.history", *answers)
        os.utime(path, (number, number))
    kept = HistoryStore(HistoryConfig(dir=str(tmp_path), max_disk_mib=1))
    kept.begin_epoch()
    left = [path.name for path in files(tmp_path)]
    assert left[0] == "answers-0000.history" and 1 < len(left) < 5 and left[-1] == "answers-0004.history"
    # besides the 32 KiB that processes share of each file that is open
    assert sum(path.stat().st_size for path in tmp_path.iterdir() if not path.name.endswith("-shm")) <= 1 << 20
