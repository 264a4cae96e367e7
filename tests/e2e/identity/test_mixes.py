"""Random requests that arrive, are preempted and aborted at random: every field of each answer is stock's.

A fault is one line that names the seed and the request. `SPECROLLOUT_MIX="SEED COUNT"` has the short form draw another
seed's requests.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.e2e.identity import mixes
from tests.e2e.identity.engines import Engine, engine, model

SEED, COUNT = (int(word) for word in os.environ.get("SPECROLLOUT_MIX", "1 200").split())
SCARCE = {"num_gpu_blocks_override": 32, "max_num_batched_tokens": 96}
MAIN = [mixes.drawn(SEED, index, left_out=(mixes.BUDGET,), most=24) for index in range(COUNT)]
BUDGETS = [mixes.thinking(SEED, index) for index in range(60)]


@dataclasses.dataclass
class Pair:
    """Our engine, and what stock answered."""

    ours: Engine
    stock: dict[str, list[Any]]


@pytest.fixture(scope="module")
def pair(models: Path) -> Iterator[Pair]:
    path = model(models, "qwen3", "float32")
    with engine(path, "float32", is_ours=False, **mixes.ENGINE, **mixes.ROOMY) as stock:
        wanted = {"main": mixes.stock_answers(stock.llm, MAIN), "budgets": mixes.stock_answers(stock.llm, BUDGETS)}
    with engine(path, "float32", is_ours=True, **mixes.ENGINE, **SCARCE) as ours:
        yield Pair(ours, wanted)


def test_every_parameter_of_vllms_is_drawn_or_left_out_with_a_reason() -> None:
    known = {one.name for one in msgspec.structs.fields(SamplingParams) if not one.name.startswith("_")}
    assert known == mixes.DRAWS.keys() | mixes.LEFT_OUT.keys()


def test_random_requests_are_answered_as_by_stock_in_every_field(pair: Pair) -> None:
    mixes.hold(pair.ours, MAIN, pair.stock["main"])


def test_thinking_budgets_hold_beside_drafts_of_others(pair: Pair) -> None:
    mixes.hold(pair.ours, BUDGETS, pair.stock["budgets"])


# name -> engine arguments of ours, and of both
NIGHTLY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scarce blocks, chunks": (SCARCE, {}),
    "chains of guidance": (
        {"spec_rollout": {"shape": "chain"}, "max_num_batched_tokens": 128},
        {"structured_outputs_config": {"backend": "guidance"}},
    ),
    "outlines, no prefix cache": (
        {"num_gpu_blocks_override": 40, "enable_prefix_caching": False},
        {"structured_outputs_config": {"backend": "outlines"}},
    ),
    "lm-format-enforcer, one at a time": (
        {"max_num_seqs": 1},
        {"structured_outputs_config": {"backend": "lm-format-enforcer"}},
    ),
    "one node, large blocks": ({"spec_rollout": {"max_draft_tokens": 1, "max_depth": 1}, "block_size": 128}, {}),
}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("name", NIGHTLY)
def test_long_thousands_of_random_requests_are_answered_as_by_stock(models: Path, name: str, seed: int) -> None:
    ours_alone, both = NIGHTLY[name]
    requests = [mixes.drawn(seed, index, left_out=(mixes.BUDGET,)) for index in range(500)]
    requests += [mixes.thinking(seed, index) for index in range(500, 600)]
    path = model(models, "qwen3", "float32")
    with engine(path, "float32", is_ours=False, **mixes.ENGINE, **mixes.ROOMY, **both) as stock:
        wanted = mixes.stock_answers(stock.llm, requests)
    with engine(path, "float32", is_ours=True, **{**mixes.ENGINE, **both, **ours_alone}) as ours:
        mixes.hold(ours, requests, wanted)
