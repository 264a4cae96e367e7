"""Engines for the identity suite: stock and ours, in this process, over small random models."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Rows must round alike whatever stands beside them: stock attention otherwise splits long contexts by batch (set for
# both engines, before vLLM is imported). One process, so that drafters can be swapped from outside.
os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM

OURS = {
    "drafters": ["ngram"],
    "budget": "fixed",
    "max_draft_tokens": 24,
    "max_depth": 24,
}
# models of the engines that run now
_running: list[str] = []


@dataclass(frozen=True)
class Engine:
    """An engine and, for ours, its model runner."""

    llm: LLM
    runner: Any = None


def model(folder: Path, arch: str, dtype: str, size: str = "1M") -> str:
    """A random model of this architecture, made once per folder."""
    from vllm_specrollout.bench.policy.random_model import make_random_model

    path = folder / f"{arch}-{dtype}-{size}"
    if not path.exists():
        make_random_model(path, arch=arch, size=size, dtype=dtype, seed=7)
    return str(path)


@contextlib.contextmanager
def engine(
    path: str, dtype: str, is_ours: bool, spec_rollout: dict[str, Any] | None = None, **kwargs: Any
) -> Iterator[Engine]:
    """An engine that is gone when the block ends."""
    settings: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 32, "enforce_eager": True, **kwargs}
    if is_ours:
        settings["additional_config"] = {"spec_rollout": {**OURS, **(spec_rollout or {})}}
    _running.append(path)
    # engines are many, and each looks through all objects at its start and its end: leave out what is imported
    is_first = not gc.get_freeze_count()
    if is_first:
        gc.freeze()
    llm = LLM(path, dtype=dtype, **settings)
    try:
        runner = None
        if is_ours:
            runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        yield Engine(llm, runner)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        _running.pop()
        if is_first and not _running:
            # and what the first one imported
            gc.freeze()
