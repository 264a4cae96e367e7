"""What `specrollout history` says and does, and what it refuses."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from tests.unit.history.poisoned import change, filled
from tests.unit.history.stored import answers_of
from vllm_specrollout.cli import commands as cli
from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.history import upkeep
from vllm_specrollout.history.database import HistoryError
from vllm_specrollout.history.folder import Lock, LockedError


@pytest.fixture
def folder(tmp_path, make_answer):
    """Two files of one run: epochs 0 to 3, two problems, one reward in each epoch."""
    where = tmp_path / "kept"
    where.mkdir()
    for number in range(2):
        answers = [
            make_answer(
                f"{number}{epoch}{problem}", problem, epoch, 100, reward=float(epoch) if problem == "q" else None
            )
            for epoch in range(4)
            for problem in "pq"
        ]
        filled(where / f"answers-000{number}.history", *answers, epoch=3)
    return where


def run(*arguments, answer=None):
    done = CliRunner().invoke(cli.app, ["history", *map(str, arguments)], input=answer)
    if isinstance(done.exception, SpecRolloutError):
        raise done.exception
    return done


def ids(path):
    return [answer.request_id for answer in answers_of(path)]


def test_inspect_counts_what_a_file_holds(folder):
    done = run("inspect", folder, "--json")
    one, two = json.loads(done.output)["files"]
    assert one["path"].endswith("answers-0000.history")
    assert {name: one[name] for name in one if name not in ("path", "file_bytes", "bytes_per_token")} == {
        "model": "",
        "vocab_size": None,
        "run": "",
        "is_being_written": False,
        "answers": 8,
        "rewards": 4,
        "problems": 2,
        "first_epoch": 0,
        "last_epoch": 3,
        "tokens": 800,
        "damaged": 0,
        "integrity": "ok",
    }
    assert one["bytes_per_token"] == pytest.approx(one["file_bytes"] / 800)
    assert "answers           8" in run("inspect", folder).output


def test_inspect_says_what_is_damaged_or_being_written(folder):
    path = folder / "answers-0000.history"
    change(path, "UPDATE answers SET tokens=x'00' WHERE id=(SELECT id FROM answers ORDER BY id LIMIT 1 OFFSET 2)")
    lock = Lock(path)
    report = upkeep.inspect(path)
    assert (report.damaged, report.answers, report.is_being_written, report.integrity) == (1, 7, True, "ok")
    lock.release()
    data = path.read_bytes()
    path.write_bytes(data[:-2048] + bytes(2048))
    assert upkeep.inspect(path).integrity != "ok"


def test_a_file_that_nothing_was_written_to_is_one_clear_error(tmp_path):
    (tmp_path / "new.history").touch()
    with pytest.raises(HistoryError, match="no history in it yet"):
        run("inspect", tmp_path)


def test_an_archive_is_named_with_what_it_has_of_its_nodes_or_that_it_has_nothing_yet(folder, tmp_path):
    kept = tmp_path / "archive"
    kept.mkdir()
    (kept / "archive.lock").touch()
    with pytest.raises(HistoryError, match="is an archive without answers yet(?s:.*)history.url"):
        run("inspect", kept)
    for number, path in enumerate(sorted(folder.glob("*.history"))):
        shutil.copy(path, kept / f"0123456789abcdef.answers-{number:04}.history")
    (kept / "archive.lock").unlink()
    assert run("inspect", kept).output.startswith(f"{kept}: an archive of 16 answers, from 2 files of its nodes\n")
    assert "archive of" not in run("inspect", folder).output


def test_merge_writes_every_answer_once_with_its_reward(folder, tmp_path):
    into = tmp_path / "all" / "merged.history"
    assert "16 answers of 2 files" in run("merge", folder, folder, "--into", into).output
    assert sorted(ids(into)) == sorted(ids(folder / "answers-0000.history") + ids(folder / "answers-0001.history"))
    rewards = {answer.request_id: answer.reward for answer in answers_of(into)}
    assert rewards["03q"] == 3.0 and rewards["03p"] is None


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda path: path.write_bytes(b"something else"), "does not start like"),
        (lambda path: change(filled(path), "PRAGMA user_version=77"), "format version 77"),
    ],
)
def test_a_merge_that_fails_leaves_neither_a_file_nor_a_folder(folder, tmp_path, spoil, cause):
    spoil(folder / "strange.history")
    for into in ("merged.history", "new/merged.history"):
        with pytest.raises(HistoryError, match=cause):
            run("merge", folder, "--into", tmp_path / into)
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_trim_keeps_the_last_epochs_of_all_files_and_gives_the_room_back(folder):
    size = (folder / "answers-0000.history").stat().st_size
    done = run("trim", folder, "--epochs", 2)
    assert done.output.count("8 answers, 4 kept") == 2
    for number in range(2):
        path = folder / f"answers-000{number}.history"
        assert ids(path) == [f"{number}{epoch}{problem}" for epoch in (2, 3) for problem in "pq"]
        assert [a.reward for a in answers_of(path)] == [None, 2.0, None, 3.0]
        assert path.stat().st_size < size
    before = [path.read_bytes() for path in sorted(folder.glob("*.history"))]
    run("trim", folder, "--epochs", 2)
    assert [path.read_bytes() for path in sorted(folder.glob("*.history"))] == before


@pytest.mark.parametrize("is_asked", [True, False])
def test_clear_asks_first_unless_told_and_removes_what_is_damaged_too(folder, is_asked):
    assert run("clear", folder, answer="n\n").exit_code == 1
    assert len(list(folder.iterdir())) == 2
    (damaged := filled(folder / "damaged.history")).write_bytes(damaged.read_bytes()[:1024] + bytes(4096))
    (folder / "empty.history").touch()
    assert run("clear", folder, *([] if is_asked else ["--yes"]), answer="y\n" if is_asked else None).exit_code == 0
    assert list(folder.iterdir()) == []


def test_clear_removes_nothing_where_a_file_only_has_the_name_of_history(folder):
    (folder / "bash.history").write_bytes(b"ls -l\n")
    before = sorted(folder.iterdir())
    with pytest.raises(HistoryError, match=r"bash.history` does not start like"):
        run("clear", folder, "--yes")
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("command", [("trim", "--epochs", 1), ("clear", "--yes")], ids=["trim", "clear"])
def test_nothing_is_trimmed_or_removed_while_one_file_is_written(folder, command):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    lock = Lock(folder / "answers-0001.history")
    with pytest.raises(LockedError, match="answers-0001.history` is being written"):
        run(command[0], folder, *command[1:])
    lock.release()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    "arguments, cause",
    [
        (("inspect", "{}/nowhere"), "does not exist"),
        (("inspect", "{}/empty"), "has no history files"),
        (("merge", "{}/kept", "--into", "{}/kept/answers-0000.history"), "exists already"),
        (("merge", "{}/kept", "--into", "{}/merged.bin"), "does not end in"),
    ],
    ids=["no such path", "an empty directory", "a merge onto a file", "a merge that no engine would read"],
)
def test_what_cannot_be_done_is_refused_with_the_way_out(folder, tmp_path, arguments, cause):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecRolloutError, match=cause) as caught:
        run(*(argument.format(tmp_path) for argument in arguments))
    assert caught.value.hint
