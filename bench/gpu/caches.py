"""Compiled kernels, packed beside the results: a machine that starts bare then compiles nothing again.

Archives are small enough to be carried one by one, and any of them may be left out: what is missing is compiled.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIMIT_BYTES = 16 << 20
"""Largest archive."""
_PIECES = {"build": 1, "triton": 2, "vllm": 2}
"""Most archives of each cache."""
_PIECE_BYTES = 24 << 20
"""Uncompressed bytes from which on a cache is packed into one archive more: threads pack them side by side."""
_File = tuple[Path, int]
"""(relative to its cache, bytes)"""


def folders(work: Path) -> dict[str, Path]:
    """What this project's installation, Triton and vLLM build, below the folder to work in."""
    return {
        "build": work / "build",
        "triton": work / "cache" / "triton",
        "vllm": work / "cache" / "vllm" / "torch_compile_cache",
    }


def environment(work: Path) -> dict[str, str]:
    """Variables that have all this built there, and nothing else with it."""
    made = folders(work)
    return {"TRITON_CACHE_DIR": str(made["triton"]), "VLLM_CACHE_ROOT": str(made["vllm"].parent)}


def state(caches: Mapping[str, Path]) -> dict[str, tuple[int, int]]:
    """Cache -> (files, bytes): equal if nothing was built since."""
    listed = {name: _files(folder) for name, folder in caches.items()}
    return {name: (len(files), sum(size for _, size in files)) for name, files in listed.items()}


def is_packed(caches: Mapping[str, Path], out: Path) -> bool:
    """Whether there is an archive of every cache that holds anything."""
    return all((out / _name(name, 0)).exists() for name, folder in caches.items() if _files(folder))


def pack(caches: Mapping[str, Path], out: Path, limit: int = LIMIT_BYTES) -> list[str]:
    """Pack each cache anew into archives of at most `limit` bytes; notes of what does not fit."""
    jobs = [
        (_name(cache, number), folder, piece)
        for cache, folder in caches.items()
        for number, piece in enumerate(_cut(_files(folder), _PIECES[cache]))
    ]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        packed = list(pool.map(lambda job: _archive(*job[1:], limit), jobs))
    notes = []
    for (name, _, _), (data, left_out) in zip(jobs, packed, strict=True):
        scratch = out / f"{name}.new"
        scratch.write_bytes(data)
        os.replace(scratch, out / name)
        if left_out:
            notes.append(f"{name}: {left_out} files were left out, to stay below {limit >> 20} MiB")
    return notes


def unpack(caches: Mapping[str, Path], folder: Path) -> int:
    """Put what the archives in `folder` hold where it belongs, unless something is there; how many files."""
    count = 0
    for archive in sorted(folder.glob("cache-*.tar.xz")):
        target = caches.get(archive.name.split("-")[1])
        if target is None:
            continue
        with tarfile.open(archive, "r:xz") as tar:
            for member in tar:
                if member.isfile() and not (target / member.name).exists():
                    tar.extract(member, target, filter="data")
                    count += 1
    return count


def _name(cache: str, piece: int) -> str:
    return f"cache-{cache}-{piece}.tar.xz"


def _files(folder: Path) -> list[_File]:
    return [
        (path.relative_to(folder), path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        # locks and half-written files are of no use elsewhere
        if path.is_file() and not path.is_symlink() and not path.name.endswith((".lock", ".tmp"))
    ]


def _cut(files: Sequence[_File], most: int) -> list[list[_File]]:
    """Pieces of about equal size, neighbours together: what is alike compresses well."""
    total = max(1, sum(size for _, size in files))
    count = min(most, -(-total // _PIECE_BYTES))
    pieces: list[list[_File]] = [[] for _ in range(count)]
    before = 0
    for path, size in files:
        pieces[min(count - 1, before * count // total)].append((path, size))
        before += size
    return [piece for piece in pieces if piece]


def _archive(folder: Path, files: Sequence[_File], limit: int) -> tuple[bytes, int]:
    """(the archive, how many files are not in it): the largest are left out until it is small enough."""
    kept = list(files)
    while True:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:xz", preset=1) as tar:
            for path, _ in kept:
                try:
                    data = (folder / path).read_bytes()
                except OSError:
                    continue
                member = tarfile.TarInfo(path.as_posix())
                member.size, member.mode = len(data), 0o644
                tar.addfile(member, io.BytesIO(data))
        if buffer.tell() <= limit:
            return buffer.getvalue(), len(files) - len(kept)
        # as many bytes as are too much, if all compressed alike
        excess = sum(size for _, size in kept) * (1 - limit / buffer.tell())
        while excess > 0:
            largest = max(kept, key=lambda one: one[1])
            kept.remove(largest)
            excess -= largest[1]
