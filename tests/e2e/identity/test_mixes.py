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
from unittest import mock

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

from tests.e2e.identity import mixes
from tests.e2e.identity.cases import Case
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import Engine, engine, model
from tests.e2e.identity.fields import differences

SEED, COUNT = (int(word) for word in os.environ.get("SPECROLLOUT_MIX", "1 200").split())
SCARCE = {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 96}
MAIN = [mixes.drawn(SEED, index, left_out=(mixes.BUDGET,), most=24) for index in range(COUNT)]
BUDGETS = [mixes.thinking(SEED, index) for index in range(60)]


@dataclasses.dataclass
class Pair:
    """Our engine, and what stock answered."""

    ours: Engine
    stock: dict[str, Any]


@pytest.fixture(scope="module")
def pair(models: Path) -> Iterator[Pair]:
    path = model(models, "qwen3", "float32")
    with engine(path, "float32", is_ours=False, **mixes.ENGINE, **mixes.ROOMY) as stock:
        wanted = {"main": mixes.stock_answers(stock.llm, MAIN), "budgets": mixes.stock_answers(stock.llm, BUDGETS)}
        wanted |= {"beams": _beams(stock.llm), "interrupted": _interrupted(stock.llm)}
    with engine(path, "float32", is_ours=True, **mixes.ENGINE, **SCARCE) as ours:
        yield Pair(ours, wanted)


def test_every_parameter_of_vllms_is_drawn_or_left_out_with_a_reason() -> None:
    known = {one.name for one in msgspec.structs.fields(SamplingParams) if not one.name.startswith("_")}
    assert known == mixes.DRAWS.keys() | mixes.LEFT_OUT.keys()


def test_random_requests_are_answered_as_by_stock_in_every_field(pair: Pair) -> None:
    assert mixes.hold(pair.ours, MAIN, pair.stock["main"]) > 0, "nobody was preempted"


def test_thinking_budgets_hold_beside_drafts_of_others(pair: Pair) -> None:
    mixes.hold(pair.ours, BUDGETS, pair.stock["budgets"])


def _beams(llm: LLM) -> list[Any]:
    prompts = [{"prompt_token_ids": list(range(i, i + 9))} for i in (20, 60)]
    found = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=6))
    return [[(beam.tokens, beam.text, beam.finish_reason) for beam in one.sequences] for one in found]


def test_beams_are_stocks(pair: Pair) -> None:
    """Each of their requests is one token, for which nothing is drafted."""
    assert _beams(pair.ours.llm) == pair.stock["beams"]


PLAIN = [
    Case("plain", f"plain {i}", list(range(30 + i, 39 + i)), {"seed": i, "max_tokens": 60, "ignore_eos": True})
    for i in range(6)
]


def _interrupted(llm: LLM) -> list[Any]:
    """What `generate` gives after one that was interrupted at its second step."""
    steps = iter([False, True])
    right = llm.llm_engine.step

    def step() -> Any:
        if next(steps):
            raise KeyboardInterrupt
        return right()

    with mock.patch.object(llm.llm_engine, "step", step), pytest.raises(KeyboardInterrupt):
        run(llm, PLAIN[:4])
    return run(llm, PLAIN[4:])


def test_a_generate_that_was_interrupted_is_taken_up_by_the_next_as_with_stock(pair: Pair) -> None:
    wanted = pair.stock["interrupted"]
    known = {case.problem_id: [list(a.outputs[0].token_ids)] for case, a in zip(PLAIN, wanted, strict=False)}
    pair.ours.runner.spec_rollout.replace_drafters([mixes.KnowsAll(known, VOCAB)])
    drafts = mixes.Drafts(pair.ours.runner)
    got = _interrupted(pair.ours.llm)
    assert not list(differences(wanted, got, left_out=(*mixes.BY_HISTORY, "request_id")))
    assert len(wanted) == len(PLAIN) and all(drafts.accepted[case.problem_id] for case in PLAIN)


def test_those_that_wait_begin_in_the_order_of_their_priorities(pair: Pair) -> None:
    order: list[int] = []
    priorities = {f"urgent {i}": (7 * i) % 5 - 2 for i in range(60)}
    llm_engine = pair.ours.llm.llm_engine
    for name, priority in priorities.items():
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        llm_engine.add_request(name, {"prompt_token_ids": [9, 8, 7, 6]}, params, priority=priority)
    begun: set[str] = set()
    while llm_engine.has_unfinished_requests():
        new = {output.request_id for output in llm_engine.step()} - begun
        order += sorted(priorities[name] for name in new)
        begun |= new
    assert order == sorted(priorities.values())


def _grammars(backend: str) -> dict[str, Any]:
    return {"structured_outputs_config": {**mixes.ENGINE["structured_outputs_config"], "backend": backend}}


# name -> engine arguments of ours, and of both
NIGHTLY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scarce blocks, chunks": (SCARCE, {}),
    "chains of guidance": (
        {"spec_rollout": {"shape": "chain"}, "max_num_batched_tokens": 128},
        _grammars("guidance"),
    ),
    "outlines, no prefix cache": (
        {"num_gpu_blocks_override": 40, "enable_prefix_caching": False},
        _grammars("outlines"),
    ),
    "lm-format-enforcer, one at a time": ({"max_num_seqs": 1}, _grammars("lm-format-enforcer")),
    "one node, large blocks": ({"spec_rollout": {"max_draft_tokens": 1, "max_depth": 1}, "block_size": 128}, {}),
}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("name", NIGHTLY)
def test_long_random_requests_by_the_thousand_are_answered_as_by_stock(models: Path, name: str, seed: int) -> None:
    ours_alone, both = NIGHTLY[name]
    plain = [mixes.drawn(seed, index, left_out=(mixes.BUDGET,)) for index in range(500)]
    budgets = [mixes.thinking(seed, index) for index in range(100)]
    path = model(models, "qwen3", "float32")
    with engine(path, "float32", is_ours=False, **{**mixes.ENGINE, **mixes.ROOMY, **both}) as stock:
        wanted = [mixes.stock_answers(stock.llm, requests) for requests in (plain, budgets)]
    with engine(path, "float32", is_ours=True, **{**mixes.ENGINE, **both, **ours_alone}) as ours:
        mixes.hold(ours, plain, wanted[0])
        mixes.hold(ours, budgets, wanted[1])
