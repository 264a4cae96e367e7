"""The buffer between rollouts and training: a folder of files with what the target computed for each answer.

What belongs here: the files' format, who may write them, how many are kept, and which of their tokens share a batch.
One engine writes, or several; each file is whole from the moment it has its name. Beyond the buffer's bound, the oldest
files go.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset

from vllm_specrollout.config.places import make_folder, new_file
from vllm_specrollout.errors import UnsupportedError

from .heads import Source

SCHEMA = 1
ENDING = ".hidden.safetensors"
FILE_TOKENS = 8192
"""Tokens after which a file is written: some hundred answers of a small policy, a few of a large one."""
MOST_UNWRITTEN = 4
"""Files that may wait for the disk; with more, answers are left out, since rollouts never wait for it."""
_COLUMNS = ("token_ids", "hidden", "last_hidden")


@dataclass(frozen=True, slots=True)
class Example:
    """One answer with its prompt, as far as the target computed it: what a head learns from."""

    # [L] int64; the first ones may be missing where the target found them in its prefix cache
    token_ids: torch.Tensor
    # [L, layers * hidden] what some layers of the target took in at each token
    hidden: torch.Tensor
    # [L, hidden] what the target's output head took in
    last_hidden: torch.Tensor
    # how many of the tokens are the prompt's
    num_prompt: int
    # of the target that computed it
    weights_version: int

    def __len__(self) -> int:
        return len(self.token_ids)


class BufferWriter:
    """Adds examples to a folder. Writing happens on a thread of its own.

    Args:
        folder: made if it is not there.
        most_tokens: of all files in the folder together.

    Raises:
        UnsupportedError: the folder cannot be written.
    """

    def __init__(self, folder: Path, source: Source, most_tokens: int) -> None:
        self._folder, self._source, self._most_tokens = folder, source, most_tokens
        self._name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            make_folder(folder)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise UnsupportedError(
                f"`{folder}` cannot be written: {error.strerror or error}",
                "name another folder, or see to its permissions",
            ) from None
        self._examples: list[Example] = []
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="specrollout-buffer")
        self._unwritten: list[Future[None]] = []
        self.left_out = 0
        """Answers that the disk was too slow for."""

    def add(self, example: Example) -> None:
        """Keep an example. Raises: writing an earlier one failed."""
        self._examples.append(example)
        if sum(map(len, self._examples)) >= FILE_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Have what was added written."""
        examples, self._examples = self._examples, []
        for done in [one for one in self._unwritten if one.done()]:
            self._unwritten.remove(done)
            done.result()
        if len(self._unwritten) >= MOST_UNWRITTEN:
            self.left_out += len(examples)
        elif examples:
            self._unwritten.append(self._disk.submit(self._write, examples))

    def close(self) -> None:
        """Wait for what is being written, and write the rest here: at the end of a process no thread takes it."""
        self._disk.shutdown()
        examples, self._examples = self._examples, []
        if examples:
            self._write(examples)
        for done in self._unwritten:
            done.result()

    def _write(self, examples: Sequence[Example]) -> None:
        tensors = {name: torch.cat([getattr(one, name) for one in examples]).contiguous() for name in _COLUMNS}
        for name in ("num_prompt", "weights_version"):
            tensors[name] = torch.tensor([getattr(one, name) for one in examples])
        tensors["lengths"] = torch.tensor([len(one) for one in examples])
        about = {"schema": SCHEMA, **{field.name: getattr(self._source, field.name) for field in fields(Source)}}
        num_tokens = sum(map(len, examples))
        path = self._folder / f"{time.time_ns():020d}-{self._name}-{num_tokens}{ENDING}"
        written = path.with_suffix(".tmp")
        new_file(written).close()
        save_file(tensors, written, {"spec_rollout": json.dumps(about)})
        written.replace(path)
        self._evict()

    def _evict(self) -> None:
        kept = 0
        for path in reversed(paths_in(self._folder)):
            kept += _num_tokens(path)
            if kept > self._most_tokens:
                path.unlink(missing_ok=True)


class Buffer(Dataset[Example | None]):
    """The examples in a folder, read when they are asked for: a rollout that goes on may have evicted them by then.

    Args:
        newest_only: only those of the newest weights of the target.

    Raises:
        UnsupportedError: there are none, or they are of several targets.
    """

    def __init__(self, folder: Path, *, newest_only: bool = False) -> None:
        self.damaged: list[Path] = []
        """Files that could not be read, and are left out."""
        self.evicted: set[int] = set()
        """Examples whose files were gone when they were asked for."""
        self._folder = folder
        # an example's file, its number there, its first token there, and its length
        self._places: list[tuple[Path, int, int, int]] = []
        sources: dict[Source, Path] = {}
        versions: list[int] = []
        for path in paths_in(folder):
            try:
                with safe_open(path, "pt") as file:
                    source = _source_of(file.metadata())
                    lengths = file.get_tensor("lengths").tolist()
                    versions += file.get_tensor("weights_version").tolist()
            except (SafetensorError, OSError, KeyError, TypeError, ValueError):
                self.damaged.append(path)
                continue
            sources.setdefault(source, path)
            begin = 0
            for i, length in enumerate(lengths):
                self._places.append((path, i, begin, length))
                begin += length
        if not self._places:
            raise UnsupportedError(
                f"`{folder}` holds no hidden states"
                + (f" ({len(self.damaged)} damaged files)" if self.damaged else ""),
                'roll out with --spec-rollout \'{"collect": {"dir": "DIR"}}\' first, and name that DIR',
            )
        if len(sources) > 1:
            raise UnsupportedError(
                f"`{folder}` holds hidden states of {len(sources)} kinds: "
                + "; ".join(
                    f"{one.target}, layers {list(one.layers)}, in {path.name}" for one, path in sources.items()
                ),
                "give each target and choice of layers a folder of its own",
            )
        self.source = next(iter(sources))
        if newest_only:
            self._places = [place for place, one in zip(self._places, versions, strict=True) if one == max(versions)]

    def __len__(self) -> int:
        return len(self._places)

    def length(self, index: int) -> int:
        """Tokens of an example."""
        return self._places[index][3]

    def num_tokens(self) -> int:
        return sum(length for *_, length in self._places)

    def places(self) -> list[list[str | int]]:
        """Which examples these are, in their order."""
        return [[path.name, *rest] for path, *rest in self._places]

    def restrict(self, places: Sequence[Sequence[Any]]) -> None:
        """Be what a buffer of this folder was earlier: what has come since is left out."""
        self._places = [(self._folder / name, i, begin, length) for name, i, begin, length in places]

    def __getitem__(self, index: int) -> Example | None:
        """None: it was evicted meanwhile. Raises: its file is damaged."""
        path, i, begin, length = self._places[index]
        try:
            with safe_open(path, "pt") as file:
                columns = [file.get_slice(name)[begin : begin + length] for name in _COLUMNS]
                numbers = [int(file.get_slice(name)[i : i + 1]) for name in ("num_prompt", "weights_version")]
        except FileNotFoundError:
            self.evicted.add(index)
            return None
        return Example(*columns, *numbers)

    def __iter__(self) -> Iterator[Example]:
        return (one for i in range(len(self)) if (one := self[i]) is not None)


def paths_in(folder: Path) -> list[Path]:
    """The buffer's files, oldest first."""
    return sorted(folder.glob(f"*{ENDING}"))


def _num_tokens(path: Path) -> int:
    count = path.name.removesuffix(ENDING).rpartition("-")[2]
    return int(count) if count.isdigit() else 0


def _source_of(metadata: dict[str, str]) -> Source:
    about = json.loads(metadata["spec_rollout"])
    if about.pop("schema") != SCHEMA:
        raise ValueError("of another version")
    return Source(**about | {"layers": tuple(about["layers"])})
