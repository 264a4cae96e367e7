"""What CUDA graphs take: device memory of engines that differ in nothing but their graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.plan import read_shape
from vllm_specrollout.policies.graphs import CAPTURE_SIZES, estimate_mib, plan_graphs

from ..common.engine_process import EngineProcess, EngineSpec
from . import models
from .engines import root_cause

MAX_NUM_SEQS, MAX_TOKENS = 256, 512
"""Most requests, and most tokens of a captured step: vLLM's own defaults."""
KV_BYTES = 2 << 30
"""KV cache of every arm, as large in all, so that graphs are what differs."""
_LOGGED = re.compile(r"Graph capturing finished in \S+ secs, took (-?[\d.]+) GiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One engine. `draft_sizes` empty: none of our graphs; `spec_rollout` None: stock vLLM."""

    name: str
    draft_sizes: tuple[int, ...] = ()
    spec_rollout: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one engine took."""

    name: str
    # MiB of device memory after its start, above that before
    device_mib: float | None
    # MiB above the engine without our graphs; what they cost
    graphs_mib: float | None
    # MiB by vLLM's log, which covers vLLM's own graphs only
    logged_mib: float | None
    # MiB by the estimate of `specrollout plan graphs`
    estimated_mib: float | None
    note: str = ""


def arms() -> list[Arm]:
    """Draft sizes are the configured most and its halves down to 3, so 3 is one size and 24 are four."""

    def ours(most: int, **changes: Any) -> dict[str, Any]:
        return {"drafters": ["ngram"], "max_draft_tokens": most, "max_depth": most, **changes}

    return [
        Arm(name="stock"),
        Arm(name="ours, no graphs for drafts", spec_rollout=ours(24, max_graphs=0)),
        Arm(name="ours, one draft size (3)", draft_sizes=(3,), spec_rollout=ours(3)),
        Arm(name="ours, four draft sizes (3 to 24)", draft_sizes=(3, 6, 12, 24), spec_rollout=ours(24)),
    ]


def estimate(arm: Arm, folder: Path) -> float | None:
    """MiB of the arm's graphs for drafts, reckoned; None where it has none."""
    if not arm.draft_sizes:
        return None
    plan = plan_graphs(arm.draft_sizes, (*CAPTURE_SIZES, *range(272, 513, 16)), MAX_NUM_SEQS, MAX_TOKENS, limit=64)
    return estimate_mib(plan, read_shape(folder))


def measure(name: str, scratch: Path, report: Callable[[str], None], *, is_verbose: bool) -> Iterator[Row]:
    """A row per arm, one engine after the other."""
    import torch

    folder = models.write(name, scratch / f"graphs-{name}")
    base: float | None = None
    for arm in arms():
        report(f"{name}: graphs of {arm.name}")
        before = torch.cuda.mem_get_info()[0]
        try:
            with EngineProcess(_spec(arm, folder, is_verbose)) as engine:
                used = (before - torch.cuda.mem_get_info()[0]) / 2**20
                logged = [float(gib) * 1024 for gib in _LOGGED.findall(engine.log())]
        except SpecRolloutError as error:
            note = root_cause(error)
            yield Row(name=arm.name, device_mib=None, graphs_mib=None, logged_mib=None, estimated_mib=None, note=note)
            continue
        if arm.spec_rollout is not None and not arm.draft_sizes:
            base = used
        yield Row(
            name=arm.name,
            device_mib=used,
            graphs_mib=None if base is None or not arm.draft_sizes else used - base,
            logged_mib=logged[-1] if logged else None,
            estimated_mib=estimate(arm, folder),
        )


def _spec(arm: Arm, folder: Path, is_verbose: bool) -> EngineSpec:
    arguments = {
        "model": str(folder),
        "dtype": "bfloat16",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": 4096,
        "kv_cache_memory_bytes": KV_BYTES,
        "gpu_memory_utilization": 0.1,
    }
    return EngineSpec(
        name=arm.name,
        arguments=arguments,
        has_plugin=arm.spec_rollout is not None,
        spec_rollout=arm.spec_rollout,
        is_verbose=is_verbose,
        environment={"VLLM_LOGGING_LEVEL": "INFO"},
    )
