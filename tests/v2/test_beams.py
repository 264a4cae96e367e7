"""Trees of a head on the V2 runner: stock's tokens, and the same chances whether one node goes on or several do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm_specrollout.bench.policy import CHECKPOINT, HEAD
from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tokenizer import prompt_text

from tests.e2e.identity.engines import Engine, engine
from tests.v2.test_identity import ENGINE
from vllm_specrollout.types import TreeBatch
from vllm_specrollout.worker.v2.beams import blocks_each

LEVELS, NODES = 6, 20
OWN = {
    "drafters": [],
    "budget": "fixed",
    "max_draft_tokens": NODES,
    "max_depth": LEVELS,
    "speculative_config": {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": LEVELS},
}
# (request, tokens before a tree) -> path of tokens -> probability that the target takes it
Trees = dict[tuple[int, int], dict[tuple[int, ...], float]]


@pytest.fixture(scope="module")
def ours() -> Iterator[Engine]:
    with engine(str(CHECKPOINT), "float32", is_ours=True, spec_rollout=OWN, **ENGINE) as one:
        yield one


def paths_of(trees: TreeBatch, i: int) -> dict[tuple[int, ...], float]:
    tree, found = trees.tree(i), {}
    paths: list[tuple[int, ...]] = []
    chances: list[float] = []
    for token, parent, log_q in zip(tree.token_ids.tolist(), tree.parents.tolist(), tree.log_q.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        chances.append(float(np.exp(log_q)) * (chances[parent] if parent >= 0 else 1.0))
        found[paths[-1]] = chances[-1]
    return found


def asked(one: Engine, temperature: float, max_tokens: int = 28, **more: Any) -> tuple[list[list[int]], Trees]:
    """The tokens, and all trees that were drafted."""
    seen: Trees = {}
    runner, came = one.runner, one.runner._came

    def noted(home: Any, words: Any) -> TreeBatch:
        trees = home.proposed()
        for i, name in enumerate(trees.request_ids):
            if (request := runner.host.get(name)) is not None and trees.tree(i).size:
                # requests are numbered one after another, whoever asks
                seen[int(name.partition("-")[0]) % 3, request.length] = paths_of(trees, i)
        return came(home, words)

    runner._came = noted
    prompts = [prompt_text(problem.prompt) for problem in problems(3, 5)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens, **more) for i in range(3)]
    found = one.llm.generate(prompts, params, use_tqdm=False)
    runner.settle()
    del runner._came
    return [list(out.outputs[0].token_ids) for out in found], seen


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_trees_of_every_beam_yield_stocks_tokens(ours: Engine, temperature: float) -> None:
    plain, none = asked(ours, temperature, extra_args={"spec_rollout": {"enabled": False}})
    assert not none
    for beam in (1, 2, 4):
        ours.runner.model_drafter.most_beams = beam
        accepted = ours.runner.stats.accepted
        tokens, trees = asked(ours, temperature)
        assert tokens == plain
        assert ours.runner.stats.accepted > accepted
        assert max(len(tree) for tree in trees.values()) == NODES
        firsts = [sum(len(path) == 2 for path in tree) for tree in trees.values()]
        # below more than one node of the first level
        has_width = [len({path[0] for path in tree if len(path) == 2}) > 1 for tree in trees.values()]
        assert any(firsts) and any(has_width) == (beam > 1)


def test_a_path_has_the_same_chance_in_its_requests_blocks_and_in_scratch(ours: Engine) -> None:
    model = ours.runner.model_drafter
    model.coupling.pin(1.1, 0.3)
    try:
        model.most_beams = 1
        _, combs = asked(ours, 1.0)
        model.most_beams = 4
        _, beams = asked(ours, 1.0)
    finally:
        model.coupling.unpin()
    compared = deepest = 0
    off = {}
    for place in sorted(combs.keys() & beams.keys()):
        comb, beam = combs[place], beams[place]
        for path in comb.keys() & beam.keys():
            if beam[path] != pytest.approx(comb[path], rel=1e-3, abs=1e-5):
                off[place, path] = comb[path], beam[path]
            compared, deepest = compared + 1, max(deepest, len(path))
    assert not off, (compared, off)
    assert compared > 50 and deepest == LEVELS
    # where more go on, no less is expected of as many nodes
    both = combs.keys() & beams.keys()
    sums = [sum(sum(trees[place].values()) for place in both) for trees in (combs, beams)]
    assert sums[1] > sums[0]


def test_scratch_blocks_are_out_of_the_pool(ours: Engine) -> None:
    scheduler = ours.llm.llm_engine.engine_core.engine_core.scheduler
    pool, beams = scheduler.kv_cache_manager.block_pool, ours.runner.model_drafter.beams
    assert beams is not None
    scratch = set(beams._scratch.tolist())
    assert len(scratch) == beams.most_rows * blocks_each(LEVELS, beams._block_size)
    free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
    assert not scratch & free and max(scratch) == len(pool.blocks) - 1
    assert pool.num_gpu_blocks == len(pool.blocks) - len(scratch)
    assert pool.reset_prefix_cache(), "no block counts as in use"
