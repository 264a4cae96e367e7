"""What a configuration names is looked at before an engine starts; `test_bad_inputs.py` has what a user reads."""

import errno
import os
import tempfile

import pytest

from vllm_specrollout.config import parse
from vllm_specrollout.config.places import check_places
from vllm_specrollout.errors import ConfigError


def check(**given) -> None:
    config = parse(given)
    assert config is not None
    check_places(config)


def test_folders_are_made_and_a_recording_is_left_to_the_engine(tmp_path):
    (tmp_path / "old.zst").write_bytes(b"kept")
    check(history={"dir": str(tmp_path / "a" / "b")}, record=str(tmp_path / "new"))
    check(record=str(tmp_path / "old.zst"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "old.zst"]
    assert list((tmp_path / "a" / "b").iterdir()) == [] and (tmp_path / "old.zst").read_bytes() == b"kept"


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path, monkeypatch):
    def refuse(**options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(
        ConfigError, match="^`history.dir` is .*, which cannot be used: Read-only file system\n\nhint: "
    ):
        check(history={"dir": str(tmp_path)})


@pytest.mark.parametrize("path", ["file", "file/inside", "to nowhere/inside", "loop", "n" * 300])
def test_what_cannot_be_a_folder_is_one_error(tmp_path, path):
    (tmp_path / "file").touch()
    (tmp_path / "to nowhere").symlink_to(tmp_path / "none" / "none")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match=r"^`history.dir` is .*, which cannot be used: \w"):
        check(history={"dir": str(tmp_path / path)})


@pytest.mark.parametrize(
    "path, problem",
    [
        ("folder", "it is no regular file"),
        ("fifo", "it is no regular file"),
        ("none/t.zst", "there is no folder"),
        ("file/t.zst", "Not a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("to nowhere", "there is no folder"),
        ("n" * 300, "File name too long"),
    ],
)
def test_what_cannot_be_a_recording_is_one_error(tmp_path, path, problem):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "to nowhere").symlink_to(tmp_path / "none" / "t.zst")
    with pytest.raises(ConfigError, match=f"^`record` is .*, which cannot be used: {problem}"):
        check(record=str(tmp_path / path))


def test_a_link_to_a_file_that_can_be_made_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "t.zst")
    check(record=str(tmp_path / "link"))
    assert not (tmp_path / "t.zst").exists(), "the engine alone makes it"
