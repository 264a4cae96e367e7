"""Without seeds nothing can be compared token by token; the frequencies must still be the model's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from scipy.stats import chisquare
from vllm import SamplingParams

from tests.drafters import TreeByTree
from tests.e2e.identity.engines import engine, model
from tests.reference.trees import from_paths
from vllm_specrollout.types import DraftTree, RequestView

# Of simulated runs in which a drafted token stood for what was drawn in 5% of all rows, the checks fail in 88% where
# right ones are drafted and in all 300 where others are; at 6% of all rows, in 99% and in all.
SAMPLES = 1500
# accepted drafts per request, at the least
ACCEPTED = {"right": 0.8, "wrong": 0.15, "mixed": 0.25}
ALLOWED = list(range(40, 52))  # a small vocabulary, so that every cell is well filled


class Drafts(TreeByTree):
    """Proposes the likeliest tokens (right), the least likely ones (wrong), or some of both, as branches two deep."""

    name = "fixed"

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def tree(self, view: RequestView, max_nodes: int, max_depth: int, is_chain: bool) -> DraftTree:
        paths = [([a, b], 1.0) for a in self.tokens for b in self.tokens]
        return from_paths(paths, max_nodes, max_depth)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = model(tmp_path_factory.mktemp("models"), "qwen3", "float32")
    with engine(path, "float32", is_ours=True, max_logprobs=-1, seed=123) as one:
        yield one


def _softmaxes(ours: Any, prefixes: Sequence[Sequence[int]]) -> np.ndarray:
    """The model's next-token distributions over ALLOWED after each prefix, from plain requests."""
    params = SamplingParams(max_tokens=1, logprobs=-1, extra_args={"spec_rollout": {"enabled": False}})
    requests = [{"prompt_token_ids": list(prefix)} for prefix in prefixes]
    outputs = ours.llm.generate(requests, [params] * len(requests), use_tqdm=False)
    found = [output.outputs[0].logprobs[0] for output in outputs]
    p = np.exp([[one[token].logprob for token in ALLOWED] for one in found])
    return p / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("right", marks=pytest.mark.identity),
        pytest.param("wrong", marks=pytest.mark.nightly),
        "mixed",
    ],
)
def test_unseeded_frequencies_are_the_softmax_whatever_is_drafted(ours: Any, kind: str, tmp_path: Path) -> None:
    prompt = [7, 90, 33, 61]
    first = _softmaxes(ours, [prompt])[0]
    by_likelihood = [ALLOWED[i] for i in np.argsort(-first)]
    drafts = {"right": by_likelihood[:3], "wrong": by_likelihood[-3:], "mixed": by_likelihood[::4]}[kind]
    ours.runner.spec_rollout.replace_drafters([Drafts(drafts)])
    ours.llm.collective_rpc("spec_rollout_stats", kwargs={"reset": True})
    params = SamplingParams(max_tokens=4, allowed_token_ids=ALLOWED, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt}] * SAMPLES
    answers = [o.outputs[0].token_ids for o in ours.llm.generate(requests, [params] * SAMPLES, use_tqdm=False)]
    (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    # nearly all steps after the prompt verify a tree; how often one is right is known from the softmax
    assert stats["drafted"] > 8 * SAMPLES
    assert stats["accepted"] > SAMPLES * ACCEPTED[kind]
    # Token 0 comes from the prompt's row, tokens 1 to 3 from drafted rows: given its prefix, each follows the softmax.
    prefixes = Counter(tuple(answer[:depth]) for answer in answers for depth in range(4))
    p = dict(zip(prefixes, _softmaxes(ours, [[*prompt, *prefix] for prefix in prefixes]), strict=True))
    for depth in range(3):
        commonest = max((prefix for prefix in prefixes if len(prefix) == depth), key=prefixes.__getitem__)
        _expect([a[depth] for a in answers if tuple(a[:depth]) == commonest], p[commonest] * prefixes[commonest])
    # All drafted rows at once, for what is drafted is the same in all. Their counts vary less than those of as many
    # rows of one distribution: the check is no stricter than it says.
    _expect(
        [token for answer in answers for token in answer[1:]],
        np.sum([p[tuple(answer[:depth])] for answer in answers for depth in (1, 2, 3)], axis=0),
    )


def _expect(tokens: Sequence[int], expected: np.ndarray) -> None:
    counts = np.asarray([list(tokens).count(token) for token in ALLOWED], dtype=float)
    rare = expected < 5  # cells too thin for the test are pooled
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    assert chisquare(counts, expected).pvalue > 1e-3
