"""Small batches, proposals and steps that tests of budgets share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.trees import chain
from vllm_specrollout.trees.batch import batch_of
from vllm_specrollout.types import (
    RequestBatch,
    RequestView,
    StepRecord,
    StepTiming,
    TreeBatch,
    VerifyResult,
)


def batch(count: int, *, weights_version: int = 0) -> RequestBatch:
    prompt = np.zeros(4, dtype=np.int32)
    views = [RequestView(f"r{i}", prompt, 4, 100, weights_version=weights_version) for i in range(count)]
    return RequestBatch.of(views)


def chains(count: int, length: int, probability: float = 0.5, source: int = 0) -> TreeBatch:
    """The same chain for each request."""
    tree = chain(list(range(length)), source, probability)
    return batch_of([f"r{i}" for i in range(count)], [tree] * count)


def verified(trees: TreeBatch, accepted: Sequence[int]) -> VerifyResult:
    """So many nodes of each request's chain hold."""
    nodes = [node for count in accepted for node in range(count)]
    return VerifyResult(np.asarray(accepted, dtype=np.int32), np.asarray(nodes, dtype=np.int32))


def timing(num_requests: int, num_nodes: int, ms: float, **values: object) -> StepTiming:
    """A decode step."""
    facts = {"branches": 0, "tokens": num_requests, "is_decode_only": True, **values}
    return StepTiming(num_requests, num_requests + num_nodes, num_nodes, step_ms=ms, **facts)  # type: ignore[arg-type]


def record(
    trees: TreeBatch, accepted: Sequence[int], timing: StepTiming | None = None, *, weights_version: int = 0
) -> StepRecord:
    requests = batch(trees.num_requests, weights_version=weights_version)
    return StepRecord(None, trees, verified(trees, accepted), timing, requests)
