"""Profiles: what steps of one model cost on one host, kept from `specrollout profile` to the engines that start later.

What belongs here: what a profile is of, where it is kept, and reading one that may be damaged. How it is measured is in
profile_sweep.py and worker/profiling.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from vllm_specrollout.config import envs
from vllm_specrollout.types import StepTiming

logger = logging.getLogger("vllm.specrollout")

_FORMAT = 1
# what a profile keeps of a step; its time is kept without what asking drafters took
_COLUMNS = tuple(field.name for field in fields(StepTiming) if field.name != "ask_ms")
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
    bare = [replace(timing, step_ms=timing.step_ms - timing.ask_ms) for timing in profile.timings]
    rows = [[getattr(timing, name) for name in _COLUMNS] for timing in bare]
    body = {"format": _FORMAT, "key": asdict(profile.key), "name": profile.name, "columns": _COLUMNS, "rows": rows}
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(body, file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def load(key: ProfileKey) -> Profile | None:
    """The profile of this key; None where there is none, or, after one warning, where it cannot be used."""
    try:
        return _parse(json.loads(key.path.read_text(encoding="utf-8")), key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning(
            "The profile %s cannot be used (%s: %s) and is ignored; run `specrollout profile` again",
            key.path,
            type(error).__name__,
            error,
        )
        return None


def _parse(body: Any, key: ProfileKey) -> Profile:
    if body["format"] != _FORMAT:
        raise ValueError(f"its format is {body['format']}, not {_FORMAT}")
    if body["key"] != asdict(key):
        raise ValueError("it is of another model or host")
    if tuple(body["columns"]) != _COLUMNS:
        raise ValueError("its columns are others")
    timings = tuple(_timing(row) for row in body["rows"])
    if not timings:
        raise ValueError("it holds no steps")
    return Profile(key, str(body["name"]), timings)


def _timing(row: Sequence[Any]) -> StepTiming:
    given = dict(zip(_COLUMNS, row, strict=True))
    step_ms, is_decode_only = float(given.pop("step_ms")), given.pop("is_decode_only")
    if not (math.isfinite(step_ms) and step_ms > 0.0) or not isinstance(is_decode_only, bool):
        raise ValueError(f"a step took {step_ms} ms")
    if any(type(value) is not int or value < 0 for value in given.values()):
        raise ValueError("a count is no whole number of at least 0")
    return StepTiming(step_ms=step_ms, is_decode_only=is_decode_only, **given)
