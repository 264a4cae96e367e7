"""What a head's trees of each shape bring, out of an engine: where more nodes go on, more drafts are accepted.

A comb is a beam of one. TLT (section 5.1) drafts 10 levels, 8 beams and 64 nodes. The policy is nearly greedy at
temperature 1, so a shape gains less there than with one that has more to choose from.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm_specrollout.bench.policy import CHECKPOINT, HEAD
from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tokenizer import prompt_text

from tests.e2e.identity.engines import Engine, engine
from tests.v2.test_identity import ENGINE

LEVELS, REQUESTS, AT_ONCE = 10, 12, 4
OWN = {
    "drafters": [],
    "budget": "fixed",
    "max_draft_tokens": 64,
    "max_depth": LEVELS,
    "speculative_config": {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": LEVELS},
}
COMB, BEAMS, TLT = (1, 20), (4, 20), (8, 64)
SHAPES = (COMB, BEAMS, TLT, (1, 12), (2, 12))
"""Nodes of a level that go on, and nodes that are drafted."""


def drafted(ours: Engine, temperature: float, beam: int, nodes: int) -> tuple[list[list[int]], float]:
    """The tokens, and how many drafts of a tree are accepted where the answer goes on for as long as trees are deep."""
    ours.runner.model_drafter.most_beams = beam
    host, seen = ours.runner.host, defaultdict[str, list[tuple[int, int]]](list)
    came_home = host.came_home

    def counted(step: Any, result: Any) -> None:
        drafts = zip(step.trees.request_ids, step.trees.sizes.tolist(), result.num_accepted.tolist(), strict=True)
        for name, size, accepted in drafts:
            seen[name.partition("-")[0]].append((size, accepted))
        came_home(step, result)

    host.came_home = counted
    own = {"max_draft_tokens": nodes}
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=96, extra_args={"spec_rollout": own})
        for i in range(REQUESTS)
    ]
    prompts = [prompt_text(one.prompt) for one in problems(REQUESTS, 12)]
    found: list[Any] = []
    for begin in range(0, REQUESTS, AT_ONCE):
        some = slice(begin, begin + AT_ONCE)
        found += ours.llm.generate(prompts[some], params[some], use_tqdm=False)
    ours.runner.settle()
    host.came_home = came_home
    counts: list[int] = []
    for one in found:
        left = len(one.outputs[0].token_ids) - 1
        for size, accepted in seen[one.request_id]:
            if size and left > LEVELS:
                counts.append(accepted)
            left -= 1 + accepted
    assert len(counts) > 2 * REQUESTS
    return [list(one.outputs[0].token_ids) for one in found], statistics.fmean(counts)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_wider_trees_are_accepted_further(temperature: float) -> None:
    with engine(
        str(CHECKPOINT), "float32", is_ours=True, spec_rollout=OWN, **{**ENGINE, "max_num_seqs": 8 * AT_ONCE}
    ) as ours:
        # each of the requests has room for eight beams
        assert ours.runner.model_drafter.beams.most_rows == 8 * AT_ONCE
        drafted(ours, temperature, *COMB)  # what its two weights are learned from
        found = {shape: drafted(ours, temperature, *shape) for shape in SHAPES}
    tokens = [tokens for tokens, _ in found.values()]
    accepted = {shape: count for shape, (_, count) in found.items()}
    print(temperature, accepted, flush=True)
    assert all(own == tokens[0] for own in tokens)
    assert accepted[BEAMS] >= 1.10 * accepted[COMB], accepted
    assert accepted[TLT] >= 1.20 * accepted[COMB], accepted
    assert accepted[2, 12] >= 0.98 * accepted[1, 12], accepted
