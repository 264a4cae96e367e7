"""Random requests at random times on the V2 runner: every field of each answer is stock's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity import mixes
from tests.e2e.identity.engines import engine
from tests.v2.models import small_model as model

ENGINE: dict[str, Any] = {**mixes.ENGINE, "max_num_seqs": 16, "max_model_len": 320}
# seeds at the ends of 64 bits end stock's engine where a request has several samples
LEFT_OUT = (mixes.BUDGET, "n")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.nightly
@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_long_random_requests_are_answered_as_by_stock_in_every_field(models: Path, shape: str) -> None:
    requests = [mixes.drawn(21, index, left_out=LEFT_OUT, most=10) for index in range(40)]
    path = model(models, "qwen3", "float32")
    with engine(path, "float32", is_ours=False, **ENGINE, **mixes.ROOMY) as stock:
        wanted = mixes.stock_answers(stock.llm, requests)
    drafts = {"max_draft_tokens": 6, "max_depth": 6, "shape": shape}
    with engine(path, "float32", is_ours=True, spec_rollout=drafts, num_gpu_blocks_override=24, **ENGINE) as ours:
        mixes.hold(ours, requests, wanted)
