"""What `specrollout history` says and does, and what it refuses."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from vllm_specrollout.cli import commands as cli
from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.history import upkeep
from vllm_specrollout.history.frames import MAGIC, HistoryError
from vllm_specrollout.history.locking import LockedError
from vllm_specrollout.history.log import Writer
from vllm_specrollout.history.records import EpochRecord, RewardRecord


@pytest.fixture
def folder(tmp_path, make_answer):
    """Two files of one run: epochs 0 to 3, two problems, one reward that came later."""
    where = tmp_path / "kept"
    where.mkdir()
    for number in range(2):
        writer = Writer(where / f"answers-000{number}.history")
        for epoch in range(4):
            writer.append(EpochRecord(epoch))
            for problem in "pq":
                frame = writer.append(make_answer(f"{number}{epoch}{problem}", problem, epoch, 100))
            writer.append(RewardRecord(frame.sequence, "?", float(epoch)))
        writer.close()
    return where


def run(*arguments, answer=None):
    done = CliRunner().invoke(cli.app, ["history", *map(str, arguments)], input=answer)
    if isinstance(done.exception, SpecRolloutError):
        raise done.exception
    return done


def ids(path):
    return [answer.request_id for answer in upkeep.answers_of(path)]


def test_inspect_counts_what_a_file_holds(folder):
    done = run("inspect", folder, "--json")
    one, two = json.loads(done.output)["files"]
    assert one["path"].endswith("answers-0000.history")
    assert {name: one[name] for name in one if name not in ("path", "file_bytes", "bytes_per_token")} == {
        "version": 2,
        "model": "",
        "vocab_size": None,
        "is_being_written": False,
        "records": 16,
        "answers": 8,
        "rewards": 4,
        "problems": 2,
        "first_epoch": 0,
        "last_epoch": 3,
        "tokens": 800,
        "missing": 0,
        "damaged": 0,
        "torn_bytes": 0,
    }
    assert one["bytes_per_token"] == pytest.approx(one["file_bytes"] / 800)
    assert "answers           8" in run("inspect", folder).output


def test_inspect_says_what_is_damaged_torn_or_being_written(folder, make_answer):
    path = folder / "answers-0000.history"
    writer = Writer(path)
    writer.append(make_answer("last"))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data[:-3])
    report = upkeep.inspect(path)
    assert (report.missing, report.damaged, report.is_being_written) == (1, 1, True)
    assert report.torn_bytes > 0 and report.answers < 9


def test_a_file_that_no_writer_got_to_has_no_version(tmp_path):
    (tmp_path / "new.history").touch()
    report = upkeep.inspect(tmp_path / "new.history")
    assert report.version is None and report.bytes_per_token is None
    assert "version           -" in run("inspect", tmp_path).output


def test_merge_writes_every_answer_once_with_its_reward(folder, tmp_path):
    into = tmp_path / "all" / "merged.history"
    assert "16 answers of 2 files" in run("merge", folder, folder, "--into", into).output
    assert sorted(ids(into)) == sorted(ids(folder / "answers-0000.history") + ids(folder / "answers-0001.history"))
    rewards = {answer.request_id: answer.reward for answer in upkeep.answers_of(into)}
    assert rewards["03q"] == 3.0 and rewards["03p"] is None


def test_a_merge_that_fails_leaves_no_file(folder, tmp_path):
    (folder / "strange.history").write_bytes(b"something else")
    with pytest.raises(SpecRolloutError, match="does not start like"):
        run("merge", folder, "--into", tmp_path / "merged.history")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_trim_keeps_the_last_epochs_of_all_files(folder):
    done = run("trim", folder, "--epochs", 2)
    assert done.output.count("8 answers, 4 kept") == 2
    for number in range(2):
        path = folder / f"answers-000{number}.history"
        assert ids(path) == [f"{number}{epoch}{problem}" for epoch in (2, 3) for problem in "pq"]
        assert [a.reward for a in upkeep.answers_of(path)] == [None, 2.0, None, 3.0]
    before = [path.stat() for path in folder.iterdir()]
    run("trim", folder, "--epochs", 2)
    assert [path.stat().st_ino for path in folder.iterdir()] == [stat.st_ino for stat in before]


def test_clear_asks_first(folder):
    assert run("clear", folder, answer="n\n").exit_code == 1
    assert len(list(folder.iterdir())) == 2
    assert run("clear", folder, answer="y\n").exit_code == 0
    assert list(folder.iterdir()) == []


def test_clear_with_yes_does_not_ask_and_removes_what_is_damaged_too(folder):
    (damaged := folder / "damaged.history").write_bytes(MAGIC + b"something else")
    (folder / "empty.history").touch()
    assert run("clear", folder, "--yes").exit_code == 0
    assert not damaged.exists() and not list(folder.glob("*.history"))


def test_clear_removes_nothing_where_a_file_only_has_the_name_of_history(folder):
    (folder / "bash.history").write_bytes(b"ls -l\n")
    before = sorted(folder.iterdir())
    with pytest.raises(HistoryError, match=r"bash.history` does not start like"):
        run("clear", folder, "--yes")
    assert sorted(folder.iterdir()) == before


def test_merge_makes_no_folder_where_a_source_cannot_be_read(folder, tmp_path):
    (folder / "later.history").write_bytes(MAGIC + bytes(24))
    with pytest.raises(HistoryError, match="damaged"):
        run("merge", folder, "--into", tmp_path / "new" / "all.history")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", [("trim", "--epochs", 1), ("clear", "--yes")], ids=["trim", "clear"])
def test_nothing_is_trimmed_or_removed_while_one_file_is_written(folder, command):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    writer = Writer(folder / "answers-0001.history")
    with pytest.raises(LockedError, match="answers-0001.history` is being written"):
        run(command[0], folder, *command[1:])
    writer.close()
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


def test_answers_read_back_are_those_that_were_merged(folder, tmp_path):
    run("merge", folder, "--into", tmp_path / "merged.history")
    sources = [answer for path in sorted(folder.iterdir()) for answer in upkeep.answers_of(path)]
    for one, other in zip(sources, upkeep.answers_of(tmp_path / "merged.history"), strict=True):
        assert np.array_equal(one.token_ids, other.token_ids) and one.request_id == other.request_id
