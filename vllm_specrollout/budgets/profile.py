"""Profiles: what steps of one model cost on one host, kept from `specrollout profile` to the engines that start later.

What belongs here: what a profile is of, where it is kept, and reading one that may be damaged. How it is measured is in
profile_sweep.py and worker/profiling.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from vllm_specrollout.budgets.step_cost import COLUMNS, Timing
from vllm_specrollout.config import envs
from vllm_specrollout.types import StepTiming

logger = logging.getLogger("vllm.specrollout")

_FORMAT = 1
_FEWER_COLUMNS = COLUMNS[:-1]  # as an earlier release kept them: what asking takes is in no profile
# of a model's configuration, what says nothing of its speed
_NOT_SHAPE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What step times depend on; a profile is used where all of it agrees."""

    # hash of the model's shape: the same for every checkpoint of a training run
    model: str
    dtype: str
    # the GPU's name, or the CPU's with its cores and the threads in use
    device: str
    vllm: str
    tensor_parallel: int
    # without torch.compile and graphs
    is_eager: bool

    @property
    def path(self) -> Path:
        """The file that holds such a profile, if there is one."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]
        return envs.cache_dir() / "profiles" / f"{digest}.json"


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured steps, and what they are of."""

    key: ProfileKey
    # the model's name or folder; for readers only
    name: str
    timings: tuple[StepTiming, ...]


class _Body(msgspec.Struct):
    """The file."""

    format: int
    key: ProfileKey
    name: str
    columns: tuple[str, ...]
    rows: list[Timing]


def shape_hash(config: Mapping[str, Any]) -> str:
    """Of a model's configuration (config.json), the part that bears on speed."""
    shape = {key: value for key, value in config.items() if key not in _NOT_SHAPE}
    # whatever is no JSON counts by its kind: its text may hold an address
    text = json.dumps(shape, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def save(profile: Profile) -> Path:
    """Write a profile in the place of an older one of the same key; whole or not at all.

    Raises:
        OSError: the disk refuses.
    """
    path = profile.key.path
    path.parent.mkdir(parents=True, exist_ok=True)
    bare = [replace(timing, step_ms=timing.step_ms - timing.ask_ms, ask_ms=0.0) for timing in profile.timings]
    body = _Body(_FORMAT, profile.key, profile.name, COLUMNS, [Timing.of(timing) for timing in bare])
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(body))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def load(key: ProfileKey) -> Profile | None:
    """The profile of this key; None where there is none, or, after one warning, where it cannot be used."""
    try:
        body = msgspec.json.decode(key.path.read_bytes(), type=_Body)
        if body.format != _FORMAT or body.key != key or body.columns not in (COLUMNS, _FEWER_COLUMNS):
            raise ValueError("it is of another model or host, or of another release")
        if not body.rows or any(timing.step_ms <= 0.0 for timing in body.rows):
            raise ValueError("it holds no steps, or one that took no time")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning(
            "The profile %s cannot be used (%s: %s) and is ignored; run `specrollout profile` again",
            key.path,
            type(error).__name__,
            error,
        )
        return None
    return Profile(key, body.name, tuple(timing.step() for timing in body.rows))
