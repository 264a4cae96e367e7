"""What holds prompts, answers or ids is its owner's alone."""

import os
import stat
from pathlib import Path

import pytest

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.config.places import make_folder
from vllm_specrollout.history import upkeep
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.replay.files import TraceWriter


@pytest.fixture(autouse=True)
def _careless_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Of everything in a folder, and of itself."""
    return {
        str(path.relative_to(folder.parent)): stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))
    }


def test_a_history_is_its_owners_alone_and_stays_so_when_it_is_merged(tmp_path):
    store = HistoryStore(HistoryConfig(dir=str(tmp_path / "new" / "kept")))
    store.begin_epoch()
    store.close()
    upkeep.merge([tmp_path / "new" / "kept" / "answers-0000.history"], tmp_path / "new" / "all" / "all.history")
    assert modes(tmp_path / "new") == {
        "new": 0o700,
        "new/kept": 0o700,
        "new/kept/answers-0000.history": 0o600,
        "new/kept/node": 0o600,
        "new/all": 0o700,
        "new/all/all.history": 0o600,
    }


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.zst"])
def test_a_trace_is_its_owners_alone(tmp_path, name):
    TraceWriter(tmp_path / name).close()
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_folder_that_is_there_keeps_its_mode(tmp_path):
    (tmp_path / "shared").mkdir(0o775)
    make_folder(tmp_path / "shared" / "own")
    assert modes(tmp_path / "shared") == {"shared": 0o775, "shared/own": 0o700}


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    for path in ("file", "file/inside"):
        with pytest.raises(NotADirectoryError):
            make_folder(tmp_path / path)
