"""A checkpoint is read from files that others may be writing: as it was when it was opened, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file

from vllm_specrollout.errors import ConfigError, ForbiddenError
from vllm_specrollout.worker.models.checkpoint import MOST_HEADER, configuration, opened

WEIGHTS = {
    "fc.weight": torch.arange(6.0).reshape(2, 3),
    "norm.weight": torch.ones(3, dtype=torch.bfloat16),
    "half": torch.full((2,), 0.5, dtype=torch.float16),
    "d2t": torch.arange(4),
    "one": torch.tensor(7.0),
    "none": torch.zeros(0, 3),
}


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A folder with a checkpoint of one file."""
    folder = tmp_path / "drafters" / "head"
    folder.mkdir(parents=True)
    save_file(WEIGHTS, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"hidden_size": 3}')
    return folder


def everything(path: Path, below: Path | None = None) -> dict[str, torch.Tensor]:
    with opened(path, below) as checkpoint:
        return checkpoint.read(checkpoint.stored)


def test_tensors_are_what_was_saved_whichever_file_they_are_in(head: Path) -> None:
    # more than is read at a time
    more = {"more": torch.ones(2), "long": torch.arange(700_001.0)}
    save_file(more, head / "more.safetensors")
    found = everything(head)
    assert found.keys() == WEIGHTS.keys() | more.keys() and torch.equal(found["long"], more["long"])
    for name, weight in WEIGHTS.items():
        assert found[name].dtype == weight.dtype and torch.equal(found[name], weight), name
    assert everything(head / "model.safetensors").keys() == WEIGHTS.keys()


def test_a_file_that_is_cut_short_afterwards_takes_nothing_with_it(head: Path) -> None:
    """A mapped one would end this process at the next touch, so first it is looked for among what is mapped."""
    found, file = everything(head), head / "model.safetensors"
    assert str(file) not in Path("/proc/self/maps").read_text()
    os.truncate(file, 100)
    assert torch.equal(found["fc.weight"], WEIGHTS["fc.weight"])


@pytest.mark.parametrize("change", ["cut", "longer", "overwritten"])
def test_a_file_that_is_written_between_opening_and_reading_is_refused(head: Path, change: str) -> None:
    file = head / "model.safetensors"
    with opened(head) as checkpoint, pytest.raises(ConfigError, match="ended early|written meanwhile") as refusal:
        about = file.stat()
        if change == "overwritten":
            # the clock of a file may stand still for longer than this test runs
            os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
        else:
            os.truncate(file, about.st_size + (8 if change == "longer" else -8))
        checkpoint.read(checkpoint.stored)
    assert "write it aside, then rename it" in refusal.value.hint


def test_a_file_that_takes_its_place_by_renaming_disturbs_nobody(head: Path) -> None:
    with opened(head) as checkpoint:
        save_file({"fc.weight": torch.zeros(9)}, head / "aside")
        (head / "aside").rename(head / "model.safetensors")
        assert torch.equal(checkpoint.read(["fc.weight"])["fc.weight"], WEIGHTS["fc.weight"])
    assert everything(head)["fc.weight"].shape == (9,)


@contextlib.contextmanager
def fifo(path: Path) -> Iterator[None]:
    """One whose writer goes as soon as a reader comes, so that a reader who waits for it fails and does not hang."""
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: os.close(os.open(path, os.O_WRONLY)), daemon=True)
    writer.start()
    try:
        yield
    finally:
        # a reader for a writer that has not come so far: it stays until that is gone
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        writer.join()
        os.close(reader)


@pytest.mark.parametrize("name", ["x.safetensors", "config.json"])
def test_a_fifo_is_refused_and_not_waited_for(head: Path, name: str) -> None:
    (head / "config.json").unlink()
    with fifo(head / name), pytest.raises(ConfigError, match=f"`{name}` is no regular file"):
        everything(head)
        configuration(head)


def header(**about: Any) -> bytes:
    text = json.dumps(about).encode()
    return len(text).to_bytes(8, "little") + text


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "JSON of 0"),
        (b"\0" * 8, "not JSON"),
        (b"\x7fELF\x02\x01\x01\x00" + b"\0" * 99, f"the limit is {MOST_HEADER}"),
        ((MOST_HEADER + 1).to_bytes(8, "little") + b" " * (MOST_HEADER + 1), f"the limit is {MOST_HEADER}"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "not JSON that can be read"),
        (b"\x02" + b"\0" * 7 + b"[]", "holds a list"),
        (header(a=7), "`a` in it is no tensor"),
        (header(a={**ONE, "shape": [-1, -1]}) + b"1234", "`a` in it is no tensor"),
        (header(a=ONE) + b"123", "`a` in it is no tensor"),
        (header(a={**ONE, "data_offsets": [-4, 0]}) + b"1234", "`a` in it is no tensor"),
        (header(a={**ONE, "shape": [1 << 60, 1 << 60]}) + b"1234", "not those of its shape"),
        (header(a={**ONE, "dtype": "F4"}) + b"1234", "dtype 'F4', which nothing here reads"),
    ],
    ids=["empty", "no header", "ELF", "long", "deep", "list", "number", "negative", "cut", "before", "huge", "F4"],
)
def test_what_is_no_checkpoint_is_one_clear_error(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=f"`{tmp_path}` cannot be read: .*{told}"):
        everything(tmp_path)


@pytest.mark.parametrize("path", ["/proc/kmsg", "/etc/passwd", "/", "a\0b", "/nowhere", "x" * 5000])
def test_places_without_a_checkpoint_are_one_clear_error(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read|holds no safetensors"):
        everything(Path(path))
    with contextlib.suppress(ConfigError):
        assert configuration(Path(path)) is None


def test_a_configuration_is_an_object_or_refused_or_not_there(head: Path) -> None:
    assert configuration(head) == {"hidden_size": 3}
    assert configuration(head.parent) is configuration(head / "model.safetensors") is None
    for text in ("[" * 100_000 + "]" * 100_000, "[1]", "{", " " * (1 << 20) + "{}"):
        (head / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"`config\.json`"):
            configuration(head)


# --- below a folder --------------------------------------------------------------------------------------------------


def test_below_a_folder_paths_are_absolute_or_from_there(head: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(head.parent)
    for path in (head, Path("head"), Path("head/model.safetensors"), Path("x/../head"), tmp_path / "link" / "head"):
        assert everything(path, head.parent).keys() == everything(path, tmp_path / "link").keys() == WEIGHTS.keys()
    assert configuration(Path("head"), head.parent) == {"hidden_size": 3}


def test_nothing_leads_out_and_what_lies_outside_is_refused_alike(head: Path, tmp_path: Path) -> None:
    root = tmp_path / "mine"
    linked = root / "linked"
    linked.mkdir(parents=True)
    (root / "folder").symlink_to(head)
    (root / "loop").symlink_to(root / "loop")
    for name in ("model.safetensors", "config.json"):
        (linked / name).symlink_to(head / name)
    refused = [head, tmp_path / "nowhere", Path("/proc/kcore"), Path("../drafters/head"), Path("folder"), Path("a\0b")]
    for path in [*refused, linked, linked / "model.safetensors"]:
        with pytest.raises(ForbiddenError) as refusal:
            everything(path, root)
        assert refusal.value.cause == f"`{path}` leads out of the folder that this server takes drafters from"
    with pytest.raises(ForbiddenError, match="`linked` leads out"):
        configuration(Path("linked"), root)
    with pytest.raises(ConfigError):
        everything(Path("loop"), root)
