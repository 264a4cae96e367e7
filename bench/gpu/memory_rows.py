"""Rows of graph memory: device memory of engines that differ in nothing but their CUDA graphs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_specrollout.plan import CAPTURE_SIZES, estimate_mib, plan_graphs, read_shape

from ..runner.engine_process import EngineProcess, EngineSpec
from . import models

MAX_NUM_SEQS, MAX_TOKENS = 256, 512
"""Most requests, and most tokens of a captured step: vLLM's own defaults."""
ARMS: dict[str, tuple[int, ...] | None] = {
    "stock": None,
    "no graphs for drafts": (),
    "one draft size": (3,),
    "four draft sizes": (3, 6, 12, 24),
}
"""Engine -> draft sizes that it captures graphs for, the configured most and its halves down to 3."""
_KV_BYTES = 2 << 30
_LOGGED = re.compile(r"Graph capturing finished in \S+ secs, took (-?[\d.]+) GiB")


class Rows:
    """The rows, each with an engine of its own; see runner.py.

    Args:
        setup: `model`, and `work`: the folder to work in.
    """

    def __init__(self, setup: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        self._folder = models.write(setup["model"], Path(setup["work"]) / "models" / setup["model"])

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def measure(self, params: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        sizes = ARMS[params["arm"]]
        before = torch.cuda.mem_get_info()[0]
        engine = EngineProcess(self._spec(params["arm"], sizes))
        try:
            used = (before - torch.cuda.mem_get_info()[0]) / 2**20
            logged = [float(gib) * 1024 for gib in _LOGGED.findall(engine.log())]
        finally:
            engine.kill()
        return {
            "device_mib": used,
            # by vLLM's log, which covers vLLM's own graphs only
            "logged_mib": logged[-1] if logged else None,
            "estimated_mib": estimate(sizes, self._folder) if sizes else None,
        }

    def _spec(self, name: str, sizes: tuple[int, ...] | None) -> EngineSpec:
        arguments = {
            "model": str(self._folder),
            "dtype": "bfloat16",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_model_len": 4096,
            # as large in all, so that graphs are what differs
            "kv_cache_memory_bytes": _KV_BYTES,
            "gpu_memory_utilization": 0.1,
        }
        return EngineSpec(
            name=name,
            arguments=arguments,
            has_plugin=sizes is not None,
            spec_rollout=spec_rollout(sizes),
            environment={"VLLM_LOGGING_LEVEL": "INFO"},
        )


def spec_rollout(sizes: tuple[int, ...] | None) -> dict[str, Any] | None:
    """The engine's configuration; None: stock vLLM."""
    if sizes is None:
        return None
    most = max(sizes, default=24)
    return {
        "drafters": ["ngram"],
        "max_draft_tokens": most,
        "max_depth": most,
        **({} if sizes else {"max_graphs": 0}),
    }


def estimate(sizes: tuple[int, ...], folder: Path) -> float:
    """MiB of the graphs for these draft sizes, reckoned."""
    plan = plan_graphs(sizes, (*CAPTURE_SIZES, *range(272, 513, 16)), MAX_NUM_SEQS, MAX_TOKENS, limit=64)
    return estimate_mib(plan, read_shape(folder))
