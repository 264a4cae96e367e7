"""Caches in archives: small enough, whole, and put back where they were."""

import os
import random

import pytest

from bench.gpu import caches


@pytest.fixture
def built(tmp_path):
    """Caches with something in them; and the folder for archives."""
    folders = caches.folders(tmp_path / "work")
    rng = random.Random(0)
    for name, folder in folders.items():
        for i in range(3):
            path = folder / f"{i}" / "kernel.bin"
            path.parent.mkdir(parents=True)
            path.write_bytes(rng.randbytes(20_000) + name.encode() * 1000)
    (folders["triton"] / "half.tmp").write_text("half")
    (tmp_path / "out").mkdir()
    return folders, tmp_path / "out"


def test_what_was_packed_is_put_back_elsewhere(built, tmp_path):
    folders, out = built
    assert caches.pack(folders, out) == []
    assert sorted(path.name for path in out.iterdir()) == [f"cache-{n}-0.tar.xz" for n in ("build", "triton", "vllm")]
    elsewhere = caches.folders(tmp_path / "elsewhere")
    assert caches.unpack(elsewhere, out) == 9
    for name, folder in elsewhere.items():
        assert (folder / "1" / "kernel.bin").read_bytes() == (folders[name] / "1" / "kernel.bin").read_bytes()
    assert not (elsewhere["triton"] / "half.tmp").exists()


def test_what_is_there_already_is_left_alone(built):
    folders, out = built
    caches.pack(folders, out)
    path = folders["build"] / "0" / "kernel.bin"
    path.write_text("newer")
    assert caches.unpack(folders, out) == 0
    assert path.read_text() == "newer"


def test_no_archive_is_larger_than_the_limit_and_what_is_left_out_is_told(built):
    folders, out = built
    (folders["vllm"] / "huge.bin").write_bytes(os.urandom(300_000))
    notes = caches.pack(folders, out, limit=100_000)
    assert [note.partition(":")[0] for note in notes] == ["cache-vllm-0.tar.xz"]
    assert all(path.stat().st_size <= 100_000 for path in out.iterdir())
    assert caches.unpack(caches.folders(out / "elsewhere"), out) == 9


def test_a_large_cache_is_cut_into_pieces_of_which_any_can_be_unpacked(built, monkeypatch, tmp_path):
    folders, out = built
    monkeypatch.setattr(caches, "_PIECE_BYTES", 25_000)
    caches.pack(folders, out)
    names = sorted(path.name for path in out.iterdir())
    assert "cache-triton-1.tar.xz" in names and "cache-build-1.tar.xz" not in names
    # no more files than a transfer may have, with the results and the log
    assert len(names) <= 6
    (out / "cache-triton-0.tar.xz").unlink()
    elsewhere = caches.folders(tmp_path / "elsewhere")
    caches.unpack(elsewhere, out)
    assert 0 < len(list(elsewhere["triton"].rglob("kernel.bin"))) < 3


def test_a_change_is_noticed_and_so_is_an_archive_that_is_missing(built):
    folders, out = built
    before = caches.state(folders)
    assert not caches.is_packed(folders, out)
    caches.pack(folders, out)
    assert caches.is_packed(folders, out) and caches.state(folders) == before
    (folders["triton"] / "new.bin").write_text("new")
    assert caches.state(folders) != before
