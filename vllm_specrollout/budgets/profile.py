"""Profiles: what steps of one model cost on one host, kept from `specrollout profile` to the engines that start later.

What belongs here: what a profile is of, where it is kept, reading one that may be damaged, and the sweep behind the
command: which steps are run, and what their times are summed up to. How they are run is in worker/profiling.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from vllm_specrollout.budgets.base import BaseBudget, bounded
from vllm_specrollout.budgets.papers.fastgrpo import FastGrpoBudget
from vllm_specrollout.budgets.step_cost import COLUMNS, StepCost, Timing
from vllm_specrollout.config import envs
from vllm_specrollout.drafters.base import BaseDrafter
from vllm_specrollout.errors import ConfigError, logger
from vllm_specrollout.trees.batch import batch_of, merge_select
from vllm_specrollout.types import (
    ROOT,
    DraftLimits,
    DraftTree,
    RequestBatch,
    StepPlan,
    StepRecord,
    StepTiming,
    TreeBatch,
)

SIZES = (0, 1, 2, 4, 8, 16)
"""Draft tokens per request; a chain of each size, and of the larger ones also a tree of `WIDTH` paths."""
WIDTH = 4
_SMALLEST_TREE = 8
_FORMAT = 1
_File = TypeVar("_File", bound=msgspec.Struct)
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
        return folder() / f"{digest(self)}.json"


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


# --- files of profiles: of steps, and of drafters (cluster/profiles.py) -----------------------------------------------


def folder() -> Path:
    """Of this user's profiles."""
    return envs.cache_dir() / "profiles"


def digest(key: Any) -> str:
    """A name for what a profile is of."""
    return hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]


def write(path: Path, body: msgspec.Struct) -> None:
    """Put a file in the place of an older one, whole or not at all.

    Raises:
        OSError: the disk refuses.
    """
    content = msgspec.json.encode(body)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_file(path: Path, kind: type[_File], check: Callable[[_File], None], way: str) -> _File | None:
    """What a file holds; None where there is none, or, after one warning that ends in `way`, where it is of no use."""
    try:
        body = msgspec.json.decode(path.read_bytes(), type=kind)
        check(body)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError) as error:
        said = "The profile %s cannot be used (%s: %s) and is ignored; %s"
        logger.warning(said, path, type(error).__name__, error, way)
        return None
    return body


def save(profile: Profile) -> Path:
    """Write a profile in the place of an older one of the same key; whole or not at all.

    Raises:
        OSError: the disk refuses.
    """
    bare = [replace(timing, step_ms=timing.step_ms - timing.ask_ms, ask_ms=0.0) for timing in profile.timings]
    write(profile.key.path, _Body(_FORMAT, profile.key, profile.name, COLUMNS, [Timing.of(timing) for timing in bare]))
    return profile.key.path


def load(key: ProfileKey) -> Profile | None:
    """The profile of this key; None where there is none, or, after one warning, where it cannot be used."""

    def check(body: _Body) -> None:
        if body.format != _FORMAT or body.key != key or body.columns != COLUMNS:
            raise ValueError("it is of another model or host, or of another release")
        if not body.rows or any(timing.step_ms <= 0.0 for timing in body.rows):
            raise ValueError("it holds no steps, or one that took no time")

    body = read_file(key.path, _Body, check, "run `specrollout profile` again")
    return None if body is None else Profile(key, body.name, tuple(timing.step() for timing in body.rows))


# --- the sweep --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Draft:
    """What every request drafts in one step."""

    nodes: int
    width: int = 1


def drafts(sizes: Sequence[int] = SIZES) -> tuple[Draft, ...]:
    """The kinds of step that a sweep goes through, again and again, so that drift meets all of them alike."""
    return (*(Draft(n) for n in sizes), *(Draft(n, WIDTH) for n in sizes if n >= _SMALLEST_TREE))


def random_tree(draft: Draft, vocab_size: int, rng: np.random.Generator, source: int = 0) -> DraftTree:
    """`width` paths of equal length side by side, of random tokens; siblings differ."""
    nodes = np.arange(draft.nodes, dtype=np.int32)
    return DraftTree(
        ((int(rng.integers(vocab_size)) + nodes) % vocab_size).astype(np.int32),
        np.where(nodes < draft.width, ROOT, nodes - draft.width).astype(np.int32),
        np.full(draft.nodes, np.log(0.5), dtype=np.float32),
        np.full(draft.nodes, source, dtype=np.int32),
    )


class RandomDrafter(BaseDrafter):
    """Proposes random trees of the width asked for; the budget asks for their size."""

    name = "random"

    def __init__(self, vocab_size: int, sweep: ProfileSweep, seed: int = 0) -> None:
        self._vocab_size, self._sweep = vocab_size, sweep
        self._rng = np.random.default_rng(seed)

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        bounds = zip(limits.max_nodes.tolist(), limits.max_depth.tolist(), limits.is_chain.tolist(), strict=True)
        return batch_of(batch.request_ids, [self._one(*bound) for bound in bounds])

    def _one(self, max_nodes: int, max_depth: int, is_chain: bool) -> DraftTree:
        width = 1 if is_chain else self._sweep.now.width
        return random_tree(Draft(min(max_nodes, max_depth * width), width), self._vocab_size, self._rng)


class ProfileSweep(BaseBudget):
    """A budget that goes through the kinds of draft, step after step, and keeps the times of all of them."""

    def __init__(self, kinds: Sequence[Draft]) -> None:
        super().__init__(max(kind.nodes for kind in kinds), max(kind.nodes for kind in kinds))
        self.kinds = tuple(kinds)
        self._step = 0
        self.now = self.kinds[0]
        self.is_recording = False
        self.timings: list[StepTiming] = []

    def limits(self, batch: RequestBatch) -> DraftLimits:
        self.now = self.kinds[self._step % len(self.kinds)]
        self._step += 1
        return bounded(batch, self.now.nodes, max(self.now.nodes, 1))

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        return StepPlan(merge_select(proposals, limits).trees, "profile")

    def observe(self, record: StepRecord) -> None:
        timing = record.timing
        if self.is_recording and timing is not None and timing.is_decode_only and timing.step_ms > 0.0:
            self.timings.append(timing)


def shuffled(timings: Sequence[StepTiming]) -> list[StepTiming]:
    """In an order that is the same each time and puts like steps far apart: who forgets, forgets all kinds alike."""
    return [timings[i] for i in np.random.default_rng(0).permutation(len(timings))]


def summary(timings: Sequence[StepTiming]) -> dict[str, Any]:
    """What a table shows, in plain JSON types.

    Returns:
        "by_rows": per number of rows, "steps", their median "ms" and "fitted_ms", of steps without branches.
        "line": milliseconds of plain steps of so many rows, of having drafts at all, of a branch.
        "error": the median relative error of the cost table on these steps.
        "c_peak": rows of the knee (FastGRPO, Appendix B), None if time does not grow yet.
        "is_corner": False if that is the knee of a straight line.
    """
    cost, knee = StepCost(), FastGrpoBudget(1, 1)
    cost.seed(shuffled(timings))
    knee.seed(shuffled(timings))
    fitted, found = [cost.predict(one.batch, one.nodes, one.branches) for one in timings], knee.knee
    by_rows = []
    for rows in sorted({timing.rows for timing in timings if not timing.branches}):
        at = [i for i, timing in enumerate(timings) if timing.rows == rows and not timing.branches]
        by_rows.append(
            {
                "rows": rows,
                "steps": len(at),
                "ms": float(np.median([timings[i].step_ms for i in at])),
                "fitted_ms": float(np.median([fitted[i] for i in at])),
            }
        )
    errors = [abs(ms - timing.step_ms) / timing.step_ms for ms, timing in zip(fitted, timings, strict=True)]
    return {
        "by_rows": by_rows,
        "line": {
            **{f"rows_{rows}": cost.plain_ms(rows) for rows in (1, 16, 64, 256)},
            "draft": float(cost.added_ms(1, 1)[1] - (cost.plain_ms(2) - cost.plain_ms(1))),
            "branch": cost.branch_ms,
        },
        "error": float(np.median(errors)),
        "c_peak": None if found is None else found.rows,
        "is_corner": found is not None and found.is_corner,
    }


def undisturbed(timings: Sequence[StepTiming], share: float = 3.0) -> list[StepTiming]:
    """Without steps that took `share` times the median of their kind: something else disturbed them."""
    kinds: dict[tuple[int, int, int], list[float]] = {}
    for timing in timings:
        kinds.setdefault((timing.batch, timing.rows, timing.branches), []).append(timing.step_ms)
    most = {kind: share * float(np.median(times)) for kind, times in kinds.items()}
    return [timing for timing in timings if timing.step_ms <= most[timing.batch, timing.rows, timing.branches]]
