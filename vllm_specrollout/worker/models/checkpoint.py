"""Checkpoint of a model that drafts, in files that may still be written: read as it was when opened, or not at all."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_specrollout.errors import ConfigError, ForbiddenError, shown

MOST_HEADER = 4 << 20
"""Bytes that name a file's tensors: some 30,000 of them."""
MOST_CONFIG = 1 << 20
_PIECE = 1 << 20
"""Bytes read at a time: behind one long read on a shared core, a step of 5 ms waited for 150."""
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
}
_HINT = "give a whole checkpoint in safetensors; write it aside, then rename it"


class _OpenFile:
    """A regular file, opened once; a context manager.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        # whoever opens a FIFO waits for its writer, which may never come
        try:
            self._file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
        except ValueError as error:
            raise OSError(str(error)) from None  # a zero byte in the path
        about = os.fstat(self._file.fileno())
        if not stat.S_ISREG(about.st_mode):
            self._file.close()
            raise OSError(f"`{self.name}` is no regular file")
        self.size, self._time = about.st_size, about.st_mtime_ns

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, begin: int, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, a copy."""
        found = torch.empty(num_bytes, dtype=torch.uint8)
        rest = memoryview(found.numpy())
        self._file.seek(begin)
        while rest:
            count = self._file.readinto(rest[:_PIECE])
            if not count:
                raise OSError(f"`{self.name}` ended early: it had {self.size} bytes")
            rest = rest[count:]
        return found

    def parse(self, begin: int, num_bytes: int, most: int) -> dict[str, Any]:
        """A JSON object of at most so many bytes."""
        if num_bytes > min(most, self.size - begin):
            raise OSError(f"`{self.name}` has {self.size} bytes, and JSON of {num_bytes} in it; the limit is {most}")
        try:
            found = json.loads(self.read(begin, num_bytes).numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise OSError(f"`{self.name}` is not JSON that can be read: {error}") from None
        if not isinstance(found, dict):
            raise OSError(f"`{self.name}` holds a {type(found).__name__}, not an object")
        return found

    def check_unchanged(self) -> None:
        about = os.fstat(self._file.fileno())
        if (about.st_size, about.st_mtime_ns) != (self.size, self._time):
            raise OSError(f"`{self.name}` was written meanwhile; it had {self.size} bytes, now {about.st_size}")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    file: _OpenFile
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    begin: int
    """Of its bytes in the file."""
    num_bytes: int

    def read(self) -> torch.Tensor:
        if self.dtype not in _DTYPES:
            raise OSError(f"`{self.file.name}` holds a tensor of dtype {shown(self.dtype)}, which nothing here reads")
        return self.file.read(self.begin, self.num_bytes).view(_DTYPES[self.dtype]).reshape(self.shape)


class Checkpoint:
    """The tensors of open files; of several with one name, the last file's."""

    def __init__(self, path: Path, files: list[_OpenFile]) -> None:
        self._path, self._files = path, files
        self.stored = {name: one for file in files for name, one in _tensors(file)}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Those tensors, in memory of our own, in the shapes and dtypes of `stored`.

        Raises:
            ConfigError: a file cannot be read, or was written to since it was opened.
        """
        with _told(self._path):
            found = {name: self.stored[name].read() for name in names}
            for file in self._files:
                file.check_unchanged()
        return found


@contextlib.contextmanager
def opened(path: Path, below: Path | None = None) -> Iterator[Checkpoint]:
    """A folder of safetensors files, or one such file. Nothing but names and shapes is read yet.

    Args:
        below: the folder in which all files must lie, links followed; None: anywhere.

    Raises:
        ConfigError: it cannot be read.
        ForbiddenError: it leads out of `below`.
    """
    with contextlib.ExitStack() as stack:
        with _told(path):
            files = [stack.enter_context(_OpenFile(file)) for file in _files(path, below)]
            found = Checkpoint(path, files)
        yield found


def configuration(path: Path, below: Path | None = None) -> dict[str, Any] | None:
    """What config.json in a folder says; None: there is none. Arguments and errors are those of `opened`."""
    with _told(path):
        try:
            with _OpenFile(_located(path / "config.json", below, path)) as file:
                found = file.parse(0, file.size, MOST_CONFIG)
                file.check_unchanged()
                return found
        except (FileNotFoundError, NotADirectoryError):
            return None


def _files(path: Path, below: Path | None) -> list[Path]:
    place = _located(path, below, path)
    try:
        files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    except ValueError as error:
        raise OSError(str(error)) from None
    if not files:
        raise ConfigError(
            f"`{path}` holds no safetensors", "give a folder that `specrollout train-head` wrote, or a file"
        )
    return [_located(file, below, path) for file in files]


def _located(file: Path, below: Path | None, path: Path) -> Path:
    """Where a file of `path` is. What lies outside is refused alike, whatever it is and whether it is there."""
    if below is None:
        return file
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        root = below.resolve()
        place = (root / file).resolve()
        if place.is_relative_to(root):
            return place
    raise ForbiddenError(
        f"`{path}` leads out of the folder that this server takes drafters from",
        "give a path below that folder, without links that lead out",
    )


def _tensors(file: _OpenFile) -> Iterator[tuple[str, Stored]]:
    """Eight bytes say how long the JSON after them is; it says which of the bytes behind it are whose."""
    length = int.from_bytes(file.read(0, min(8, file.size)).numpy().tobytes(), "little")
    for name, about in file.parse(8, length, MOST_HEADER).items():
        if name == "__metadata__":
            continue
        match about:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
                is_whole = all(isinstance(n, int) and n >= 0 for n in shape)
            case _:
                is_whole = False
        if not is_whole or not 0 <= begin <= end <= file.size - 8 - length:
            raise OSError(f"`{file.name}` has {file.size} bytes, and `{name}` in it is no tensor of them")
        if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != end - begin:
            raise OSError(f"`{file.name}` gives `{name}` {end - begin} bytes, not those of its shape")
        yield name, Stored(file, dtype, tuple(shape), 8 + length + begin, end - begin)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # its own text may name the place behind a link
        raise ConfigError(f"`{path}` cannot be read: {error.strerror or error}", _HINT) from None
