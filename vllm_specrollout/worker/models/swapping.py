"""Replacement of a drafting model's weights while requests run, from a checkpoint that may still be written."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from vllm_specrollout.errors import ConfigError, ForbiddenError, UnsupportedError, shown
from vllm_specrollout.observe.guard import CONTAINED
from vllm_specrollout.worker.models.proposing import path_of

FLOATING = ("F32", "F16", "BF16")
"""Dtypes of weights, as safetensors names them."""
MOST_HEADER = 4 << 20
"""Bytes that name a file's tensors: some 30,000 of them."""
MOST_CONFIG = 1 << 20
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
        # whoever opens a FIFO waits for its writer, and this thread is the engine's only one
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
            count = self._file.readinto(rest)
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


_OF_TRAINING = ("t2d", "verifier_norm", "verifier_lm_head")
"""Tensors of a checkpoint that vLLM leaves unread."""
_FREE = (
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "speculators_version",
    "speculators_config",
    "dtype",
    "torch_dtype",
)
"""Keys of a configuration that say nothing of the weights' shapes."""

_HEAD = "lm_head.weight"
_MAP = "d2t"
"""Buffer of what must be added to a token of a smaller vocabulary to have the target's."""


def swap(runner: Any, path: Path, below: Path | None = None, *, is_new: bool = True) -> dict[str, Any]:
    """Load other weights of the same shape into the model that drafts.

    Args:
        runner: our V1 runner, between two steps.
        path: a folder with config.json and safetensors, as the drafter was started with; or one safetensors file.
        below: the folder out of which nothing is read, links followed; a `path` that is not absolute lies in it.
        is_new: False: the drafter had these before; whether they can draft is not asked again.

    Returns:
        "tensors": how many were read, and "version": how often weights were swapped.

    Raises:
        ConfigError, UnsupportedError: the weights cannot be used; the drafter goes on with its own.
        ForbiddenError: they lie outside of `below`; likewise.
    """
    drafter = runner.model_drafter
    if drafter is None:
        raise ConfigError(
            "no model drafts in this engine", "start it with a `speculative_config`; a failed one stays off"
        )
    proposer = drafter.of_vllm
    config = proposer.vllm_config.speculative_config.draft_model_config
    shared = _shared_modules(proposer.model, runner.get_model())
    kept = _read(path_of(proposer), path, below, shared, is_new)
    if is_new:
        _check_drafts(kept, path, proposer.vllm_config.model_config.get_vocab_size())
    try:
        with set_current_vllm_config(proposer.vllm_config), _without(proposer.model, shared), torch.no_grad():
            initialize_layerwise_reload(proposer.model)
            proposer.model.load_weights(iter(kept.items()))
            finalize_layerwise_reload(proposer.model, config)
    except CONTAINED as error:
        # half old and half new is worse than none
        runner.model_drafter = None
        runner.spec_rollout.drop(drafter, error)
        raise ConfigError(
            f"`{path}` could not be loaded: {error}", "the drafter is off; start the engine anew"
        ) from error
    drafter.begin_anew()
    runner.spec_rollout.renewed(drafter)
    runner.spec_rollout.worth.drop(drafter.name)
    runner.spec_rollout.budget.renewed(drafter.source, drafter.num_sources)
    return {"tensors": len(kept), "version": drafter.version}


def _read(
    first: Path, path: Path, below: Path | None, shared: Mapping[str, torch.nn.Module], is_new: bool
) -> dict[str, torch.Tensor]:
    """The drafter's own tensors, once all that is said of them fits the folder that it was started with."""
    _check_config(first, path, below)
    with opened(first) as old, opened(path, below) as new:
        found, wanted = (
            {name: one for name, one in both.stored.items() if not any(part in name for part in _OF_TRAINING)}
            for both in (new, old)
        )
        wrong = _misfits(found, wanted, shared.keys())
        if is_new:
            wrong["dtype"] = [
                f"{name} is {one.dtype}" for name, one in sorted(found.items()) if not _is_float(name, one)
            ]
        told = [f"{what}: {', '.join(names[:3])}" for what, names in wrong.items() if names]
        if told:
            cause = f"`{path}` does not fit the drafter that runs; {'; '.join(told)}"
            raise ConfigError(cause, f"start the engine anew with it; weights are of dtype {', '.join(FLOATING)}")
        if (head := shared.get("lm_head")) is not None:
            _check_shared(head, new, path)
        return new.read(name for name in found if not _is_of(shared, name))


def _check_config(first: Path, path: Path, below: Path | None) -> None:
    """The new weights' configuration says what the old ones' says, if they have one."""
    new, old = configuration(path, below), configuration(first)
    if old is None or new is None:
        return
    names = sorted((old.keys() | new.keys()) - set(_FREE))
    differ = [name for name in names if old.get(name) != new.get(name)]
    if differ:
        # the old one lies anywhere, and is not for whoever is told of one folder
        was = [f", was {shown(old.get(name))}" if below is None else "" for name in differ[:3]]
        told = "; ".join(f"{name} is {shown(new.get(name))}{more}" for name, more in zip(differ, was, strict=False))
        raise ConfigError(f"`{path}` is another kind of drafter: {told}", "start the engine anew with it")


def _misfits(
    found: Mapping[str, Stored], wanted: Mapping[str, Stored], shared: Collection[str]
) -> dict[str, list[str]]:
    """What must be the same and is not.

    Args:
        shared: parts that are the target's own; only their tensors may be left out, or be there in addition.
    """
    missing, unknown = (
        [name for name in sorted(names) if not _is_of(shared, name)]
        for names in (wanted.keys() - found.keys(), found.keys() - wanted.keys())
    )
    shapes = [
        f"{name} is {found[name].shape}, not {wanted[name].shape}"
        for name in sorted(found.keys() & wanted.keys())
        if found[name].shape != wanted[name].shape
    ]
    return {"missing": missing, "unknown": unknown, "shape": shapes}


def _is_float(name: str, one: Stored) -> bool:
    return one.dtype in FLOATING or (name == _MAP and one.dtype == "I64")


def _check_drafts(weights: Mapping[str, torch.Tensor], path: Path, vocabulary: int) -> None:
    """Refuse values that no training leaves: of a copy in progress, a run that diverged, or a file's holes.

    A vector of zeros is a fine bias; a matrix of zeros passes nothing on.
    """
    told = []
    for name, weight in weights.items():
        if not weight.numel():
            continue
        low, high = (value.item() for value in weight.aminmax())
        if name == _MAP:
            targets = weight + torch.arange(len(weight))
            if int(targets.min()) < 0 or int(targets.max()) >= vocabulary:
                told.append(f"{name} leads out of the vocabulary of {vocabulary}")
        elif not math.isfinite(low) or not math.isfinite(high):
            told.append(f"{name} has values that are not finite")
        elif low == high == 0 and weight.ndim > 1:
            told.append(f"{name} is all zeros")
    if told:
        raise ConfigError(
            f"`{path}` cannot draft: {'; '.join(told[:3])}",
            "give weights that were trained, whole; write them aside, then rename them",
        )


def _is_of(parts: Collection[str], name: str) -> bool:
    return any(part in parts for part in name.split("."))


def _shared_modules(model: Any, target: Any) -> dict[str, torch.nn.Module]:
    """Parts of the drafter that are the target's own, by their last name: nothing may be written into them.

    A head may share its embedding and its output head, and vLLM has one module of rotary embeddings for all models of a
    shape.
    """
    own = {id(module) for module in target.modules()}
    return {name.rpartition(".")[2]: module for name, module in model.named_modules() if id(module) in own}


def _check_shared(module: torch.nn.Module, checkpoint: Checkpoint, path: Path) -> None:
    """The output head, if there is one for a shared module, must be the target's; an embedding follows the policy, and
    is left out.
    """
    stored, weight = checkpoint.stored.get(_HEAD), getattr(module, "weight", None)
    if stored is None:
        return
    # the module's own may be padded
    if weight is not None and weight.numel() and stored.dtype in FLOATING:
        rows, *rest = stored.shape or (0,)
        if rows <= len(weight) and rest == list(weight.shape[1:]):
            given = checkpoint.read([_HEAD])[_HEAD]
            if torch.equal(weight[:rows].cpu(), given.to(weight.dtype)):
                return
    raise UnsupportedError(
        f"`{path}` brings an output head, and the drafter that runs shares its target's",
        "start the engine anew with it; from then on, others can be swapped in",
    )


@contextlib.contextmanager
def _without(model: Any, shared: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """The model as if it had no part of the target, so that reloading cannot touch that."""
    own = {id(module) for module in shared.values()}
    places = [(owner, name, one) for owner in model.modules() for name, one in owner.named_children() if id(one) in own]
    for owner, name, _ in places:
        del owner._modules[name]
    try:
        yield
    finally:
        for owner, name, one in places:
            owner._modules[name] = one
