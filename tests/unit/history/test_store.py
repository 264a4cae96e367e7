"""What is promised of the store: a problem's answers of the window, wherever they are kept and whoever wrote them."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.answers import NaiveStore
from tests.unit.history.archived import answer
from tests.unit.history.poisoned import filled
from tests.unit.history.stored import answers_in, names
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.history.answers import RewardOutcome
from vllm_specrollout.history.database import Database, Reward
from vllm_specrollout.history.epochs import EpochError
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import Answer, FinishReason


@pytest.fixture(params=["in memory", "on disk"])
def config(request, tmp_path):
    return HistoryConfig(dir="" if request.param == "in memory" else str(tmp_path / "kept"), epochs=2)


@pytest.fixture
def on_disk(tmp_path):
    return HistoryConfig(dir=str(tmp_path / "kept"), epochs=1)


def test_a_problems_answers_come_back_and_no_others(config, make_answer, same):
    store = HistoryStore(config)
    mine, other = make_answer("a"), make_answer("b", problem_id="q")
    store.append(mine)
    store.append(other)
    (found,) = answers_in(store, "p")
    assert same(found, mine)
    assert names(store, "nobody asked") == []
    assert [store.read(located).request_id for located in store.find(None)] == ["a", "b"]


def test_a_reward_is_kept_with_its_answer(config, make_answer):
    store = HistoryStore(config)
    store.append(make_answer("a"))
    assert store.report_reward("a", 0.5) is RewardOutcome.RECORDED
    assert answers_in(store, "p")[0].reward == 0.5
    assert store.report_reward("a", 0) is RewardOutcome.REPEATED
    assert answers_in(store, "p")[0].reward == 0.0
    store.begin_epoch()
    store.append(make_answer("b", epoch=0))
    assert store.report_reward("b", 1.0) is RewardOutcome.LATE
    assert store.report_reward("c", 1.0) is RewardOutcome.UNKNOWN
    assert store.stats().rewards == {"recorded": 1, "repeated": 1, "late": 1, "early": 0, "unknown": 1}


def test_a_reward_before_the_end_of_its_request_is_kept_for_it(config, make_answer):
    store = HistoryStore(config)
    store.arrived("p", "a")
    store.arrived("p", "b")
    assert store.report_reward("a", 2.0) is RewardOutcome.EARLY
    assert store.report_reward("b", 3.0) is RewardOutcome.EARLY
    assert store.append(make_answer("a")).reward == 2.0
    store.ended("b")
    assert answers_in(store, "p")[0].reward == 2.0
    assert store.report_reward("b", 3.0) is RewardOutcome.UNKNOWN


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), "1", None, True])
def test_a_reward_that_is_no_finite_number_is_refused(config, make_answer, reward):
    store = HistoryStore(config)
    store.append(make_answer("a"))
    with pytest.raises(ConfigError, match="finite number"):
        store.report_reward("a", reward)
    assert answers_in(store, "p")[0].reward is None


def test_epochs_are_guessed_until_the_trainer_names_one(config, make_answer):
    store = HistoryStore(config)

    def play(problem_id, request_id):
        epoch = store.arrived(problem_id, request_id)
        store.append(make_answer(request_id, problem_id, epoch))
        return epoch

    assert [play(problem, f"{n}") for n, problem in enumerate("pqpq")] == [0, 0, 1, 1]
    assert store.begin_epoch() == 2
    assert [play(problem, f"{n}") for n, problem in enumerate("pqpqpq", 10)] == [2] * 6


@pytest.mark.parametrize("between", [0, 1])
@pytest.mark.parametrize("restarts", [False, True])
def test_an_epoch_far_ahead_ages_nothing_and_the_trainers_next_one_takes_it_back(
    on_disk, make_answer, between, restarts
):
    """So whoever may name an epoch empties no history by it, and ends no training."""
    store = HistoryStore(on_disk)
    for epoch in range(3):
        store.append(make_answer(f"e{epoch}", epoch=store.begin_epoch(epoch)))
    running = store.arrived("p", "running")
    for far in (1_000_000, 2_000_000):
        assert store.begin_epoch(far) == far and names(store) == ["e2"], "as in the epoch behind 2"
    if between:
        store.append(make_answer("far", epoch=2_000_000))
    if restarts:
        store.close()
        store = HistoryStore(on_disk)
        assert store.epoch == 2_000_000
    with pytest.raises(EpochError, match="name 3 or a later epoch"):
        store.begin_epoch(2)
    assert store.begin_epoch(3) == 3
    store.append(make_answer("late", epoch=2_000_000))
    store.append(make_answer("running", epoch=running))
    wanted = {"running": 2, "e2": 2, "late": 3} | ({"far": 3} if between else {})
    assert {one.request_id: one.epoch for one in answers_in(store, "p")} == wanted
    store.close()
    again = HistoryStore(on_disk)
    assert again.epoch == 3 and again.begin_epoch(4) == 4


@pytest.mark.parametrize("epoch", [-1, 6, 1_000_008, 2**31 - 1, 2**31, pytest.param(10**5000, id="huge")])
def test_an_epoch_that_lies_back_or_far_ahead_is_refused_and_changes_nothing(on_disk, make_answer, epoch):
    store = HistoryStore(on_disk)
    store.begin_epoch(7)
    store.append(make_answer("a", epoch=7))
    with pytest.raises(EpochError, match="present epoch 7"):
        store.begin_epoch(epoch)
    assert store.epoch == 7 and len(answers_in(store, "p")) == 1
    store.close()
    assert HistoryStore(on_disk).epoch == 7


def test_the_epoch_the_store_begins_with_may_be_named_and_none_is_guessed_any_more(config, make_answer):
    store = HistoryStore(config)
    assert store.begin_epoch(0) == 0
    for n, problem in enumerate("pqpq"):
        assert store.arrived(problem, f"{n}") == 0
        store.append(make_answer(f"{n}", problem))


def test_behind_the_last_epoch_there_is_none_and_guessing_stays_there(config, make_answer, monkeypatch):
    monkeypatch.setattr("vllm_specrollout.history.epochs.MAX_EPOCH", 2)
    monkeypatch.setattr("vllm_specrollout.history.store.MAX_EPOCH", 2)
    store = HistoryStore(config)
    for n, problem in enumerate("pqpqpqpqpq"):
        store.append(make_answer(f"{n}", problem, store.arrived(problem, f"{n}")))
    assert store.epoch == 2
    with pytest.raises(EpochError, match="at most"):
        store.begin_epoch()


def test_an_epoch_in_a_file_that_no_index_could_hold_is_passed_over(on_disk, make_answer, tmp_path):
    (tmp_path / "kept").mkdir()
    answers = [make_answer(f"r{epoch}", epoch=epoch) for epoch in (2**31, 2**62, -1)]
    filled(tmp_path / "kept" / "other.history", *answers, make_answer("good", epoch=1), epoch=2**62)
    store = HistoryStore(on_disk)
    assert store.epoch == 1 and [one.request_id for one in answers_in(store, "p")] == ["good"]
    assert store.begin_epoch() == 2


def test_a_store_in_memory_is_bounded_and_drops_its_oldest_answers(make_answer):
    store = HistoryStore(HistoryConfig(max_mib=1))
    rng = np.random.default_rng(0)
    for number in range(30):
        store.append(make_answer(str(number), token_ids=rng.integers(0, 150_000, 40_000).astype(np.int32)))
    stats = store.stats()
    assert stats.memory_bytes <= 1 << 20 and stats.evicted == 30 - stats.answers > 0
    assert names(store) == [str(n) for n in range(stats.evicted, 30)]
    assert store.report_reward("0", 1.0) is RewardOutcome.UNKNOWN
    assert store.report_reward("29", 1.0) is RewardOutcome.RECORDED


def test_engines_that_share_a_directory_see_each_others_answers(on_disk, make_answer):
    one, two = HistoryStore(on_disk), HistoryStore(on_disk)
    one.append(make_answer("a"))
    two.append(make_answer("b"))
    two.report_reward("b", 1.0)
    assert names(two) == ["a", "b"] and set(names(one)) == {"a", "b"}, "the second one was not there at first"
    one.begin_epoch()
    assert names(one) == ["b", "a"] and answers_in(one, "p")[0].reward == 1.0
    two.report_reward("b", 2.0)
    assert answers_in(one, "p")[0].reward == 2.0
    assert one.stats().files == 2 and one.stats().answers == 2
    two.begin_epoch(7)
    one.begin_epoch(1)
    assert one.epoch == 1 and HistoryStore(on_disk).epoch == 7


def test_another_engines_file_may_be_removed_or_replaced_meanwhile(on_disk, make_answer):
    one, two = HistoryStore(on_disk), HistoryStore(on_disk)
    two.append(make_answer("b"))
    one.begin_epoch(1)
    held, path = one.find("p"), two._folder.own.path
    path.unlink()
    assert [one.read(located).request_id for located in held] == ["b"]
    filled(path, make_answer("c"))
    one.begin_epoch(1)
    assert names(one) == ["c"]
    path.unlink()
    one.begin_epoch(1)
    assert names(one) == []


def test_a_full_disk_leaves_answers_in_memory_until_there_is_room(on_disk, make_answer):
    store = HistoryStore(on_disk)
    store.append(make_answer("a"))
    own = store._folder.own._connection
    (pages,) = own.execute("PRAGMA page_count").fetchone()
    own.execute(f"PRAGMA max_page_count={pages}")
    store.append(make_answer("b", count=3000))
    store.report_reward("a", 1.0)
    assert names(store) == ["a", "b"] and store.stats().write_errors == 2 and store.stats().waiting == 1
    own.execute("PRAGMA max_page_count=1000000")
    store.begin_epoch()
    assert store.stats().waiting == 0
    store.close()
    assert [(a.request_id, a.reward) for a in answers_in(HistoryStore(on_disk), "p")] == [("a", 1.0), ("b", None)]


def test_a_store_with_a_thread_of_its_own_settles_there(on_disk, make_answer):
    store = HistoryStore(on_disk, ThreadPoolExecutor(1).submit)
    other = HistoryStore(on_disk)
    other.append(make_answer("b"))
    assert store.begin_epoch() == 1
    while not names(store):
        time.sleep(0.001)
    store.close()


def test_what_was_left_to_do_when_a_store_closed_is_not_done_to_a_file_that_may_be_anothers(on_disk, make_answer):
    tasks = []
    store = HistoryStore(on_disk, background=tasks.append)
    store.append(make_answer("a"))
    store.append(make_answer("b", epoch=store.begin_epoch(5)))
    store.report_reward("b", 0.5)
    assert store.stats().waiting == 2
    store.close()
    store.close()
    other = HistoryStore(on_disk)
    assert other.epoch == 5
    store.append(make_answer("late", epoch=5))
    other.append(make_answer("c", epoch=other.begin_epoch(6)))
    for task in tasks:
        task()
    other.append(make_answer("d", epoch=6))
    other.close()
    assert [(one.request_id, one.reward) for one in answers_in(HistoryStore(on_disk), "p")] == [
        ("b", 0.5), ("c", None), ("d", None)
    ] and store.stats().write_errors == 0  # fmt: skip


def test_an_engine_whose_own_file_is_damaged_goes_on_in_another_and_loses_nothing_that_is_not_in_it(
    on_disk, make_answer, caplog
):
    store = HistoryStore(on_disk)
    store.begin_epoch(3)
    for number in range(50):
        store.append(make_answer(f"{number}", epoch=3))
    own = store._folder.own
    own._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    size = own.path.stat().st_size
    with own.path.open("r+b") as file:
        file.seek(1024)
        file.write(bytes(size - 1024))
    # what SQLite has of it in memory is no excuse
    own._connection.execute("PRAGMA shrink_memory")
    for name in "xyz":
        store.append(make_answer(name, epoch=3))
    assert store._folder.own.path.name == "answers-0001.history" and store.stats().waiting == 0
    assert set(names(store)) >= set("xyz") and "malformed" in caplog.text
    store.close()
    again = HistoryStore(on_disk)
    assert set(names(again)) >= set("xyz") and again.epoch == 3


def test_threads_may_read_while_another_appends(on_disk, make_answer):
    store = HistoryStore(on_disk)
    answers = [make_answer(str(n), problem_id=f"p{n % 3}") for n in range(200)]
    stop = threading.Event()

    def read():
        while not stop.is_set():
            for problem in ("p0", "p1", "p2"):
                for found in answers_in(store, problem):
                    assert np.array_equal(found.token_ids, answers[int(found.request_id)].token_ids)

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for answer in answers:
            store.append(answer)
        stop.set()
        for reader in readers:
            reader.result()
    assert store.stats().answers == 200


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), is_on_disk=st.booleans(), is_late=st.booleans())
def test_a_store_is_a_list_of_answers_with_a_window_whenever_it_writes_and_however_often_it_starts(
    tmp_path_factory, seed, is_on_disk, is_late
):
    chance, tasks = random.Random(seed), []
    epochs = chance.randrange(1, 4)
    config = HistoryConfig(dir=str(tmp_path_factory.mktemp("kept")) if is_on_disk else "", epochs=epochs)
    background = {"background": tasks.append} if is_late else {}
    store, naive, asked = HistoryStore(config, **background), NaiveStore(epochs), []
    for number in range(chance.randrange(40)):
        act = chance.random()
        if act < 0.5:
            tokens = np.arange(chance.randrange(300), dtype=np.int32)
            name = str(number if chance.random() < 0.9 else number // 2)
            answer = Answer(
                name, f"p{chance.randrange(3)}", tokens[:2], tokens, FinishReason.FINISHED, 0, epoch=naive.epoch
            )
            for one in (store, naive):
                one.append(answer)
            asked.append(name)
        elif act < 0.6:
            # the next one, one far ahead, or one that takes such a call back
            given = chance.choice([None, naive.epoch + chance.randrange(10**3), naive.lowest(), naive.epoch])
            if given == naive.lowest() and given > 0:
                with pytest.raises(EpochError):
                    store.begin_epoch(given - 1)
            assert store.begin_epoch(given) == naive.begin_epoch(given)
            while tasks:
                tasks.pop(0)()
        elif act < 0.65 and is_on_disk:
            store.close()
            tasks.clear()
            store = HistoryStore(config, **background)
            assert store.epoch == naive.epoch
            # no reward for answers of another run
            assert {store.report_reward(name, 1.0) for name in asked} <= {RewardOutcome.UNKNOWN}
            asked = []
        elif asked:
            name, reward = chance.choice(asked), float(chance.randrange(3))
            assert (store.report_reward(name, reward) is not RewardOutcome.UNKNOWN) == naive.report_reward(name, reward)
        while tasks and chance.random() < 0.5:
            tasks.pop(0)()
        for problem in ("p0", "p1", "p2"):
            assert list(map(_plain, answers_in(store, problem))) == list(map(_plain, naive.answers(problem)))
    store.close()


def _plain(answer):
    return answer.request_id, answer.epoch, answer.reward, answer.token_ids.tolist()


def test_another_run_in_the_folder_neither_drafts_nor_moves_our_epoch_nor_goes(tmp_path):
    old = HistoryStore(HistoryConfig(dir=str(tmp_path), run="old"))
    old.begin_epoch(300)
    old.append(answer("x", epoch=300))
    old.close()
    new = HistoryStore(HistoryConfig(dir=str(tmp_path), run="new"))
    new.append(answer("y"))
    for epoch in (1, 2):
        assert (new.begin_epoch(), names(new)) == (epoch, ["y"])
    again = HistoryStore(HistoryConfig(dir=str(tmp_path), run="old"))
    assert (again.epoch, names(again)) == (300, ["x"])


@pytest.mark.parametrize("node", [None, "", "garbage", b"\xff" * 100])
def test_a_folder_without_its_names_goes_on_with_the_run_of_its_files(tmp_path, node):
    first = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    first.append(answer("x"))
    first.close()
    (tmp_path / "node").unlink()
    if node is not None:
        (tmp_path / "node").write_bytes(node if isinstance(node, bytes) else node.encode())
    assert names(HistoryStore(HistoryConfig(dir=str(tmp_path)))) == ["x"]


@pytest.mark.parametrize("run", ["../x", "a b", "x\n", ".", "x" * 65])
def test_a_run_that_could_name_no_file_is_refused(run):
    with pytest.raises(ConfigError, match="`history.run` is"):
        HistoryConfig(run=run)


def test_an_id_of_any_length_is_kept_as_a_digest_and_gets_its_reward(tmp_path):
    store, ids = HistoryStore(HistoryConfig(dir=str(tmp_path))), ["a" * (1 << 20), "b" * (1 << 20), "c" * 256]
    for one in ids:
        store.arrived("p", one)
        assert store.report_reward(one, 0.5) is RewardOutcome.EARLY
        store.append(answer(one))
        assert store.report_reward(one, 1.0) is RewardOutcome.REPEATED
    kept = [row.request.decode() for row in store._folder.own.rows()]
    assert len(set(kept)) == 3 and max(map(len, kept)) <= 256 and kept[2] == ids[2]
    assert set(store._requests) == set(kept) and store.stats().memory_bytes < 4096
    assert [row.reward for row in store._folder.own.rows()] == [1.0] * 3
    store.close()


def test_of_rewards_only_those_that_came_since_are_read(tmp_path):
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    for number in range(4):
        store.append(answer(f"{number}", reward=0.0))
    reader = Database(store._folder.own.path)
    assert reader.rewards(0, 10) == [], "what was written with its answer is in its row"
    store.report_reward("1", 1.0)
    ((stamp, reward),) = reader.rewards(0, 10)
    assert (reward.reward, reward.request) == Reward(1.0, 0, b"1")[::2]
    store.report_reward("3", 2.0)
    store.report_reward("1", 3.0)
    assert [one.reward for _, one in reader.rewards(stamp, 10)] == [2.0, 3.0]
    assert [one.reward for _, one in reader.rewards(0, 1)] == [2.0]
    store.close()
