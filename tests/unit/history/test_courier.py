"""Answers of one node's folder at the engines of another one, whoever is killed or slow on the way."""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from tests.unit.history.archived import KIND, ROOM, RUN, answer, file_of, noise, requests_in
from tests.waiting import until
from vllm_specrollout.cluster.mail import MailClient
from vllm_specrollout.cluster.messages import encode
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.history import courier as module
from vllm_specrollout.history.archive import Archive, Bring, Has, Page, Want
from vllm_specrollout.history.courier import Courier
from vllm_specrollout.history.database import Database, HistoryError, Reward, row_of
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)


def settled(read: Callable[[], T], wanted: T) -> T:
    """What is read once it is as wanted, or at last: it is for the test to compare."""
    end = time.monotonic() + 60.0
    while (found := read()) != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return found


class Node:
    """A folder, an engine's store in it, and its courier."""

    def __init__(
        self, folder: Path, url: str, vocabulary: Vocabulary = ANY_VOCABULARY, epochs: int = 2, run: str = "run"
    ) -> None:
        config = HistoryConfig(dir=str(folder), url=url, epochs=epochs, run=run)
        self.store = HistoryStore(config, vocabulary=vocabulary)
        self.courier = Courier(config, vocabulary)

    def found(self, what: str = "reward", problem: str | None = "p") -> dict[str, float | None]:
        """Request -> reward, or epoch, of the answers that this node can draft from."""
        read_ = (self.store.read(place) for place in self.store.find(problem))
        return {one.request_id: getattr(one, what) for one in read_ if one is not None}

    def epochs(self) -> dict[str, float | None]:
        return self.found("epoch")

    def close(self) -> None:
        self.store.close()
        self.courier.close()


class Served:
    """An archive in a thread."""

    is_open = True

    def __init__(self, folder: Path) -> None:
        self.archive = Archive(folder, f"ipc://{folder.parent}/s", ROOM)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self.archive.serve, args=(self._over.is_set,))
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        if self.is_open:
            self.archive.close()
        self.is_open = False


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    with contextlib.ExitStack() as made:

        def make(name: str, **given: object) -> Node:
            return made.enter_context(contextlib.closing(Node(tmp_path / name, f"ipc://{tmp_path}/s", **given)))  # type: ignore[arg-type]

        yield make


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[], Served]]:
    with contextlib.ExitStack() as made:
        yield lambda: made.enter_context(contextlib.closing(Served(tmp_path / "archive")))


@pytest.fixture
def served(serve: Callable[[], Served]) -> Served:
    return serve()


def spoil(path: Path, what: str) -> None:
    if what == "garbage":
        path.write_bytes(b"x" * 5000)
    elif what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)


def test_an_answer_of_one_node_drafts_on_another_and_its_later_reward_counts_there(served, nodes):
    first, second = nodes("a"), nodes("b")
    first.store.append(answer("x", reward=0.5))
    second.store.append(answer("y"))
    for one in (first, second):
        assert settled(one.found, both := {"x": 0.5, "y": None}) == both
    assert first.courier.brought == first.courier.fetched == 1
    first.store.report_reward("x", 2.0)
    assert settled(second.found, both := {"x": 2.0, "y": None}) == both
    assert second.courier.fetched == 1, "the reward came by itself"


def test_epochs_of_a_run_are_the_same_on_all_its_nodes_and_nobody_elses_begin_ours(served, nodes):
    first, second = nodes("a"), nodes("b")
    second.store.append(answer("own"))
    first.store.append(answer("x"))
    assert settled(second.epochs, same := {"own": 0, "x": 0}) == same
    first.store.begin_epoch(1)
    first.store.append(answer("y", epoch=1))
    assert settled(second.epochs, same := {"own": 0, "x": 0, "y": 1}) == same
    first.store.append(answer("z", epoch=1))
    until(lambda: "z" in second.epochs())
    assert second.store._folder.latest_epoch == 0 and second.courier.fetched == 3, "each was fetched once"


def test_a_jump_of_one_nodes_epoch_stays_there_and_what_it_answers_drafts_as_present(served, nodes):
    """So nobody who may call one server empties the history of another one."""
    first, second, fresh = nodes("a"), nodes("b"), None
    for epoch in range(3):
        if epoch:
            second.store.begin_epoch(epoch)
        second.store.append(answer(f"own{epoch}", epoch=epoch))
    first.store.begin_epoch(1_000_000)
    first.store.append(answer("far", epoch=1_000_000))
    whole = {"own0": 0, "own1": 1, "own2": 2, "far": 2}
    assert settled(second.epochs, whole) == whole
    second.store.begin_epoch()
    assert second.store.epoch == 3
    # and one that comes new to the run begins where its trainer does
    fresh = nodes("c")
    until(lambda: fresh.courier.fetched)
    assert fresh.store.begin_epoch(2) == 2
    fresh.store.append(answer("new", epoch=2))
    until(lambda: fresh.epochs().get("own2") == 2 and fresh.epochs().get("far") == 2)


def test_two_trainings_and_a_restart_at_one_archive_keep_all_their_own_answers(tmp_path, served, nodes):
    """No trainer names its run; the second one has begun when the first one is at 300, and then begins anew."""
    old = nodes("old", run="")
    old.store.begin_epoch(300)
    old.store.append(answer("x", epoch=300))
    new = nodes("new", run="")
    for number in range(16):
        new.store.append(answer(f"y{number}"))
    own = {f"y{number}" for number in range(16)}
    until(lambda: old.courier.fetched == 16 and new.courier.fetched == 1)
    new.store.begin_epoch()
    assert (new.store.epoch, set(new.found())) == (1, own)
    fresh = nodes("fresh", run="")
    until(lambda: set(fresh.epochs()) == {"x", *own})
    assert set(fresh.epochs().values()) <= {-1, -2}, "the newest of another run counts as of the last epoch"
    again = nodes("new", run="")
    assert again.store.begin_epoch(2) == 2 and set(again.found()) == own
    assert set(old.found()) == {"x"}, "what other runs have answered is for problems without an answer of ours"


def test_engines_of_two_runs_in_one_folder_leave_each_other_alone(served, nodes):
    one, two = nodes("a", run="one"), nodes("a", run="two")
    one.store.append(answer("x"))
    two.store.begin_epoch(300)
    two.store.append(answer("y", epoch=300))
    far = [nodes("b", run="one"), nodes("c", run="two")]
    for node, own in zip((one, two, *far), ("x", "y", "x", "y"), strict=True):
        assert settled(lambda node=node: set(node.found()), {own}) == {own}
    assert one.store.begin_epoch() == 1


def test_a_folder_that_is_cleared_for_another_model_is_brought_as_well(served, tmp_path, nodes):
    for name in "AB":
        vocabulary = Vocabulary(name, 100, name)
        node, far = nodes("a", vocabulary=vocabulary), nodes(f"far{name}", vocabulary=vocabulary)
        node.store.append(answer(name))
        assert settled(far.found, {name: None}) == {name: None}
        node.close()
        for path in (tmp_path / "a").glob("answers*"):
            path.unlink()


@pytest.mark.parametrize("what", ["garbage", "folder", "row", "pipe", "future"])
def test_a_bad_file_costs_itself_alone_both_ways(what, served, tmp_path, nodes, caplog):
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "answers-0000.history"
    spoil(path, what)
    if what in ("row", "future"):
        bad = row_of(answer("bad"))
        with contextlib.closing(Database(path, True, run="run")) as made:
            made.put([(1 << 55, bad) if what == "future" else (5, bad._replace(problem="text"))], (), None)  # type: ignore[arg-type]
    here, far = nodes("a"), nodes("b")
    here.store.append(answer("x"))
    far.store.append(answer("y"))
    for node in (here, far):
        until(lambda node=node: {"x", "y"} <= set(node.found()))
    is_left_out = what in ("garbage", "folder", "pipe")
    assert list(here.courier.left_out) == ["answers-0000"] * is_left_out and not here.courier.problem
    said = [one for one in caplog.messages if "is not brought to the archive" in one]
    assert len(said) == is_left_out


@pytest.mark.parametrize("what", ["garbage", "folder", "vocabulary"])
def test_a_bad_file_of_what_was_fetched_is_made_anew(what, served, tmp_path, nodes):
    (tmp_path / "b").mkdir()
    path = tmp_path / "b" / "siblings-0000.history"
    spoil(path, what)
    if what == "vocabulary":
        Database(path, True, Vocabulary("other", 9, "x"), "run").close()
    here, far = (nodes(name, vocabulary=Vocabulary("m", 100, "m")) for name in "ab")
    here.store.append(answer("x"))
    assert settled(far.found, {"x": None}) == {"x": None}


def test_a_mirror_that_is_damaged_is_brought_again_and_others_go_on(tmp_path, serve, nodes):
    first, second = nodes("a"), nodes("b")
    first.store.append(answer("x"))
    second.store.append(answer("y"))
    one = serve()
    until(lambda: {*first.found()} == {*second.found()} == {"x", "y"})
    one.close()
    mirrors = sorted((tmp_path / "archive").glob("*.history"))
    spoil(mirrors[0], "garbage")
    one = serve()
    assert list(one.archive.mirrors.left_out) == [mirrors[0].stem]
    third = nodes("c")
    until(lambda: {*third.found()} == {"x", "y"})
    assert not one.archive.mirrors.left_out


def test_a_folder_and_its_copy_get_each_others_answers(served, tmp_path, nodes, monkeypatch):
    monkeypatch.setattr(module, "SILENCE_S", 0.05)
    first = nodes("a", run="")
    first.store.append(answer("x"))
    until(lambda: first.courier.brought)
    first.close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first, second = nodes("a", run=""), nodes("b", run="")
    first.store.append(answer("y"))
    second.store.append(answer("z"))
    for node in (first, second):
        until(lambda node=node: set(node.found()) == {"x", "y", "z"})
    assert first.courier._run_name == second.courier._run_name


def test_what_other_nodes_bring_takes_the_same_descriptors_however_many_they_are(served, nodes):
    def told(names: range) -> None:
        for name in names:
            served.archive.answer(Bring(1, file_of(name), RUN, 0, ((1, row_of(answer(f"{name}"))),), ()))

    node = nodes("a")
    told(range(1, 3))
    until(lambda: len(node.found()) == 2)
    before = len(os.listdir("/proc/self/fd"))
    served.archive.mirrors._most_open = 4
    told(range(3, 40))
    until(lambda: len(node.found()) == 39)
    assert len(os.listdir("/proc/self/fd")) <= before + 16
    # the same number is another answer's on each node, and so is its reward
    served.archive.answer(Bring(2, file_of(7), RUN, 0, (), (Reward(0.5, 1, b"7"),)))
    assert settled(lambda: {of for of, reward in node.found().items() if reward}, {"7"}) == {"7"}


def test_little_waits_in_an_engine_for_an_archive_that_is_away(serve, nodes, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    first, sent = nodes("a"), list[int]()
    plain = first.courier._box.send
    monkeypatch.setattr(first.courier._box, "send", lambda note: sent.append(1) or plain(note))
    first.store.append(answer("x"))
    until(lambda: "did not answer" in first.courier.problem)
    assert not sent, "nobody is there"
    one = serve()
    until(lambda: first.courier.brought == 1)
    # it is there, and reads no more
    one._over.set()
    one._thread.join()
    for number in range(3):
        first.store.append(answer(f"{number}", tokens=noise(500_000, number)))
    until(lambda: "did not answer" in first.courier.problem)
    time.sleep(0.5)
    waits = [note for _, note in one.archive._office.receive()]
    assert sum(len(encode(note)) for note in waits) <= 12 << 20
    one.close()
    monkeypatch.setattr(module, "_PATIENCE_S", 5.0)
    one = serve()
    until(lambda: {*requests_in(one.archive.mirrors)} == {b"x", b"0", b"1", b"2"})


def test_what_comes_while_the_archive_is_gone_reaches_all_once_it_is_back(serve, nodes, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_S", 0.3)
    first, second = nodes("a"), nodes("b")
    first.store.append(answer("early"))
    until(lambda: "did not answer" in first.courier.problem)
    for number in range(3):
        one = serve()
        first.store.append(answer(f"x{number}"))
        until(lambda number=number: set(second.found()) == {"early", *(f"x{i}" for i in range(number + 1))})
        one.close()
        first.store.report_reward(f"x{number}", 1.0)
    one = serve()
    all_there = {"early": None, "x0": 1.0, "x1": 1.0, "x2": 1.0}
    until(lambda: second.found() == all_there)
    until(lambda: not first.courier.problem)
    assert second.found() == all_there


def test_rewards_are_told_again_to_an_archive_that_was_begun_between_two_questions(nodes):
    node = nodes("a")
    courier = node.courier
    courier._ended.set()
    courier._thread.join()
    lives, heard = ["1" * 16], list[tuple[str, float]]()

    def ask(note: Bring | Want) -> Has | Page:
        if isinstance(note, Want):
            return Page(note.turn, lives[-1], 0, ())
        heard.extend((lives[-1], reward.reward) for reward in note.rewards)
        if note.rows and len(node.store.find("p")) > 1:
            lives.append("2" * 16)  # killed, and begun again
        return Has(note.turn, 0 if not note.rows else max(number for number, _ in note.rows), lives[-1])

    courier._ask = ask  # type: ignore[method-assign]
    node.store.append(answer("x"))
    node.store.report_reward("x", 1.0)
    courier._bring(courier._own_files()[0])
    node.store.append(answer("y"))
    courier._bring(courier._own_files()[0])
    courier._bring(courier._own_files()[0])
    assert heard == [("1" * 16, 1.0), ("2" * 16, 1.0)]


def test_an_archive_that_lost_its_folder_is_given_all_again(tmp_path, serve, nodes):
    nodes("a").store.append(answer("x"))
    for _ in range(2):
        one = serve()
        assert settled(lambda one=one: requests_in(one.archive.mirrors), [b"x"]) == [b"x"]
        one.close()
        shutil.rmtree(tmp_path / "archive")


def test_of_the_engines_of_one_folder_one_has_the_courier_and_then_the_next(served, nodes):
    first = nodes("a")
    until(lambda: first.courier.as_dict()["goes"])
    second, far = nodes("a"), nodes("b")
    second.store.append(answer("y"))
    until(lambda: far.found() == {"y": None})
    assert not second.courier.as_dict()["goes"] and second.found() == {"y": None}, "it is no answer of another node"
    first.courier.close()
    until(lambda: second.courier.as_dict()["goes"])


def test_an_answer_in_another_vocabulary_stays_where_it_is(served, nodes):
    first = nodes("a", vocabulary=Vocabulary("A", 100, "of-a"))
    second, third = (nodes(name, vocabulary=Vocabulary("B", 100, "of-b")) for name in "bc")
    first.store.append(answer("x"))
    second.store.append(answer("y"))
    until(lambda: third.found() == {"y": None})
    assert first.found() == {"x": None} and not first.courier.fetched


def test_what_no_longer_drafts_is_neither_fetched_nor_kept(served, nodes):
    first, second = nodes("a", epochs=1), nodes("b", epochs=1)
    first.store.append(answer("old", epoch=0))
    until(lambda: second.found() == {"old": None})
    for epoch in (1, 2):
        first.store.begin_epoch(epoch)
        second.store.begin_epoch(epoch)
        until(lambda epoch=epoch: second.courier._fetched.siblings.latest_epoch() == epoch)
    first.store.append(answer("new", epoch=2))
    until(lambda: second.courier.fetched == 2)
    kept = lambda: sorted(row.request for row in second.courier._fetched.siblings.rows())  # noqa: E731
    assert settled(kept, [b"new"]) == [b"new"]
    first.store.append(answer("newer", epoch=2))
    assert settled(kept, [b"new", b"newer"]) == [b"new", b"newer"]
    assert second.courier.fetched == 3, "the old one is not fetched again"


def test_an_answer_too_long_for_a_message_stays_at_home_and_holds_nothing_up(served, nodes):
    first, second = nodes("a"), nodes("b")
    for one in (answer("before"), answer("long", tokens=noise(2_000_000)), answer("behind")):
        first.store.append(one)
    both = {"before": None, "behind": None}
    assert settled(second.found, both) == both
    assert first.courier.brought == 2 and set(first.found()) == {*both, "long"}


def test_many_answers_come_in_portions_and_each_once(served, nodes):
    first, second = nodes("a"), nodes("b")
    for number in range(1000):
        first.store.append(answer(f"{number}", problem=f"{number % 7}", tokens=500))
    until(lambda: second.courier.fetched == 1000)
    assert len(second.found(problem=None)) == 1000


def test_a_folder_has_one_archive(tmp_path, served):
    with pytest.raises(HistoryError, match="is being written by another process"):
        Archive(tmp_path / "archive", f"ipc://{tmp_path}/t", ROOM)


def test_random_bytes_from_anybody_end_nothing(served, tmp_path, nodes):
    box, rng = MailClient(f"ipc://{tmp_path}/s"), np.random.default_rng(1)
    whole = encode(Bring(0, file_of(7), KIND, 1, ((5, row_of(answer("x"))),), ()))
    for _ in range(200):
        data = bytearray(whole)
        data[rng.integers(len(data))] = rng.integers(256)
        with contextlib.suppress(Exception):
            box._socket.send(bytes(data[: rng.integers(len(data) + 1)]), 1)
    first, second = nodes("a"), nodes("b")
    first.store.append(answer("z"))
    assert settled(lambda: "z" in second.found(), True)
    assert served.archive._office.malformed, "it met some that are no message"
    box.close()


def test_an_url_without_a_key_is_an_error(tmp_path, monkeypatch):
    monkeypatch.delenv("SPECROLLOUT_KEY", raising=False)
    with pytest.raises(ConfigError, match="names no file with a key"):
        Courier(HistoryConfig(dir=str(tmp_path), url="tcp://h:1"))
