"""Drafts of any shape, made where the device's are: right paths among decoys, nonsense, chains, stars, nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm_specrollout.worker.v2.told import Asked


class FuzzLookup:
    """Stands in for the lookup of a lane: knows the true answers (by problem id), and hides them or not.

    Only an interpreted engine has its device in the host's memory, so only there it may read.
    """

    def __init__(
        self, runner: Any, answers: Mapping[str, list[int]], vocab_size: int, seed: int, quality: float
    ) -> None:
        self._runner, self._answers, self._vocab, self._quality = runner, answers, vocab_size, quality
        self._rng = np.random.default_rng(seed)
        runner.drafts.look_up = self

    def __call__(self, batch: Any, asked: Asked, on_device: Any) -> tuple[torch.Tensor, ...]:
        width = self._runner.drafts.width
        tokens = np.full((len(asked.rows), width), -1, dtype=np.int32)
        parents = tokens.copy()
        for i, name in enumerate(batch.req_ids):
            rest = self._rest(name, int(batch.idx_mapping[i]))
            size = int(self._rng.integers(0, asked.limits[i] + 1))
            self._draw(tokens[i], parents[i], size, rest, bool(asked.branches[i]), asked.ends[i])
        chances = np.broadcast_to(0.95 ** np.arange(1, width + 1), tokens.shape).astype(np.float32)
        return tuple(torch.from_numpy(np.ascontiguousarray(each)) for each in (tokens, parents, chances))

    def _rest(self, name: str, row: int) -> list[int]:
        request = self._runner.host.get(name)
        if request is None or self._rng.random() > 0.9:
            return []
        done = int(self._runner.req_states.total_len.gpu[row]) - request.num_prompt
        return self._answers.get(request.admission.problem_id, [])[done:]

    def _draw(
        self, tokens: np.ndarray, parents: np.ndarray, size: int, rest: list[int], may_branch: bool, ends: np.ndarray
    ) -> None:
        rng, tip, level = self._rng, -1, 0  # tip: the true node of this level, if it was drafted
        is_chain = not may_branch or rng.random() < 0.2
        used: set[tuple[int, int]] = set()
        for node in range(size):
            parent = node - 1 if is_chain else tip if rng.random() < 0.7 else int(rng.integers(-1, node))
            wants_truth = parent == tip and level < len(rest) and rng.random() < self._quality
            token = rest[level] if wants_truth else int(rng.integers(0, self._vocab))
            while (parent, token) in used or token in ends:
                token = int(rng.integers(0, self._vocab))
            used.add((parent, token))
            tokens[node], parents[node] = token, parent
            if parent == tip and level < len(rest) and token == rest[level]:
                tip, level = node, level + 1
