"""A drafter that proposes anything: right paths among decoys, nonsense, chains, stars, nothing; new every step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.drafters import TreeByTree
from vllm_specrollout.trees.build import depths
from vllm_specrollout.types import EMPTY_TREE, ROOT, DraftTree, RequestView


class FuzzDrafter(TreeByTree):
    """Knows the true answers (by problem id), and hides them or not."""

    name = "fuzz"

    def __init__(
        self, answers: Mapping[str, list[int]], vocab_size: int, seed: int = 0, quality: float = 0.8, source: int = 0
    ) -> None:
        self.answers = answers
        self.vocab_size = vocab_size
        self.quality = quality
        self.source = source
        self.rng = np.random.default_rng(seed)

    def rest(self, view: RequestView) -> list[int]:
        """What is still to come of the true answer."""
        return self.answers.get(view.problem_id, [])[len(view.token_ids) - view.num_prompt_tokens :]

    def tree(self, view: RequestView, max_nodes: int, max_depth: int, is_chain: bool) -> DraftTree:
        rng = self.rng
        size = int(rng.integers(0, max_nodes + 1)) if max_nodes else 0
        if size == 0:
            return EMPTY_TREE
        truth = self.rest(view) if rng.random() < 0.9 else []
        is_chain = is_chain or rng.random() < 0.2
        tokens: list[int] = []
        parents: list[int] = []
        tip, level = ROOT, 0  # tip: the true node of this level, if it was drafted
        for _ in range(size):
            parent = len(tokens) - 1 if is_chain else tip if rng.random() < 0.7 else int(rng.integers(-1, len(tokens)))
            wants_truth = parent == tip and level < len(truth) and rng.random() < self.quality
            token = truth[level] if wants_truth else int(rng.integers(0, self.vocab_size))
            if any(p == parent and t == token for p, t in zip(parents, tokens, strict=True)):
                continue
            tokens.append(token)
            parents.append(parent)
            if parent == tip and level < len(truth) and token == truth[level]:
                tip, level = len(tokens) - 1, level + 1
        return _within(tokens, parents, max_depth, self.source)


def _within(tokens: list[int], parents: list[int], max_depth: int, source: int) -> DraftTree:
    """The nodes no deeper than allowed; log_q 0 throughout, so that any order is best first."""
    array = np.asarray(parents, dtype=np.int32)
    kept = [i for i, depth in enumerate(depths(array).tolist()) if depth <= max_depth] if tokens else []
    index = {ROOT: ROOT, **{old: new for new, old in enumerate(kept)}}
    n = len(kept)
    return DraftTree(
        np.asarray([tokens[i] for i in kept], dtype=np.int32),
        np.asarray([index[parents[i]] for i in kept], dtype=np.int32),
        np.zeros(n, dtype=np.float32),
        np.full(n, source, dtype=np.int32),
    )
