"""The probability that a trained head's nodes are given is the rate at which they are accepted, out of real drafts.

Two weights alone leave some tenths off by up to 0.07: a softmax is not quite what a head and its target do. Budgets
count with the probability times what held of its tenth lately (`Acceptance`), and so does this test.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm_specrollout.bench.policy import CHECKPOINT
from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tokenizer import prompt_text

from tests.e2e.identity.engines import Engine, engine
from vllm_specrollout.types import ROOT, TENTHS, TreeBatch, VerifyResult

HEAD = {"method": "eagle3", "model": str(CHECKPOINT.parent / "head"), "num_speculative_tokens": 8}
OWN = {"drafters": [], "budget": "fixed", "max_draft_tokens": 16, "max_depth": 8, "speculative_config": HEAD}
PROBLEMS, ANSWERS = 32, 4


def tenth_of(chances: np.ndarray) -> np.ndarray:
    return np.minimum((chances * TENTHS).astype(np.int64), TENTHS - 1)


class Seen:
    """Takes note of what a drafter's nodes were given and what became of them, as far as their parents held."""

    def __init__(self, drafter: Any) -> None:
        # as the coupling has it; as budgets count with it; and what became of the node
        self.said: list[float] = []
        self.given: list[float] = []
        self.held: list[bool] = []
        self._acceptance = drafter.acceptance
        self._observe, drafter.observe = drafter.observe, self.observe

    def observe(self, trees: TreeBatch, result: VerifyResult) -> None:
        factors = self._acceptance.calibration()
        self._observe(trees, result)
        first = np.repeat(trees.node_start[:-1], result.num_accepted)
        holds = np.zeros(trees.num_nodes + 1, dtype=np.bool_)
        holds[result.accepted + first] = True
        above = np.where(trees.parents == ROOT, -1, trees.parents + np.repeat(trees.node_start[:-1], trees.sizes))
        # the root's own place is the one behind all nodes
        holds[-1] = True
        judged = holds[above]
        said = np.exp(trees.log_q[judged])
        self.said += said.tolist()
        self.given += np.minimum(said * factors[trees.source[judged], tenth_of(said)], 1.0).tolist()
        self.held += holds[:-1][judged].tolist()


def ask(ours: Engine, temperature: float, seed: int, **more: Any) -> list[list[int]]:
    prompts = [prompt_text(one.prompt) for one in problems(PROBLEMS, seed)]
    tokenizer = ours.llm.get_tokenizer()
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in prompts for _ in range(ANSWERS)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=128, **more) for i in range(len(ids))]
    found = ours.llm.generate([{"prompt_token_ids": own} for own in ids], params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_in_every_tenth_nodes_are_accepted_as_often_as_they_are_said_to_be(temperature: float) -> None:
    with engine(str(CHECKPOINT), "float32", is_ours=True, spec_rollout=OWN) as ours:
        ask(ours, temperature, seed=31)  # what is learned from
        seen = Seen(ours.runner.model_drafter)
        drafted = ask(ours, temperature, seed=32)
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
        plain = ask(ours, temperature, seed=32, extra_args={"spec_rollout": {"enabled": False}})
    assert drafted == plain and stats["accepted"] > 0
    said, given, held = np.array(seen.said), np.array(seen.given), np.array(seen.held)
    off = {}
    for name, chances, most in (("the coupling", said, 0.09), ("budgets", given, 0.03)):
        for tenth in range(TENTHS):
            own = tenth_of(chances) == tenth
            if own.sum() >= 400:
                off[name, tenth] = float(chances[own].mean() - held[own].mean())
        assert len(off) and all(abs(value) <= most for (one, _), value in off.items() if one == name), off
