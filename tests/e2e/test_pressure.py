"""Drafts preempt nobody: with too small a KV cache, requests are pushed out as often as by stock vLLM, or less."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.engines import engine, model
from tests.e2e.pressure import check_that_drafts_preempt_nobody, requests


# more sizes, and scheduled ahead: tests/integration/test_pressure.py
@pytest.mark.parametrize(
    "blocks, size, count, lengths, least",
    [
        pytest.param(12, 32, 24, (50, 80), 40, id="blocks of 32 tokens"),
        pytest.param(6, None, 12, (105, 125), 12, id="blocks of vLLM's own size", marks=pytest.mark.nightly),
    ],
)
def test_with_a_small_kv_cache_nobody_is_preempted_for_a_draft(
    tmp_path: Path, blocks: int, size: int | None, count: int, lengths: tuple[int, int], least: int
) -> None:
    check_that_drafts_preempt_nobody(
        model(tmp_path, "qwen3", "float32"),
        requests(count, *lengths, seed=24 if size else 12),
        least,
        {"drafters": ["history", "ngram"]},
        num_gpu_blocks_override=blocks,
        max_model_len=256,
        **({"block_size": size} if size else {}),
    )


def test_the_scheduler_has_as_many_blocks_as_stocks(tmp_path: Path) -> None:
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "1"
    path = model(tmp_path, "qwen3", "float32")
    counts = []
    for is_ours in (False, True):
        with engine(path, "float32", is_ours=is_ours, block_size=32) as one:
            core = one.llm.llm_engine.engine_core.engine_core
            counts.append(core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks)
            if is_ours:
                assert len(one.runner.scratch) > 1 and one.runner.shape[0].value == "tree"
    assert counts[0] == counts[1] > 100
