"""Answers to keep, for tests of the history and of its commands."""

import zlib
from collections.abc import Callable

import numpy as np
import pytest

from vllm_specrollout.types import Answer, FinishReason


@pytest.fixture
def make_answer() -> Callable[..., Answer]:
    def make(request_id: str, problem_id: str = "p", epoch: int = 0, count: int = 20, **changes) -> Answer:
        rng = np.random.default_rng(zlib.crc32(f"{request_id} {problem_id}".encode("utf-8", "surrogatepass")))
        fields = {
            "problem_id": problem_id,
            "request_id": request_id,
            "epoch": epoch,
            "weights_version": epoch,
            "status": FinishReason.FINISHED,
            "token_ids": rng.integers(0, 5000, count).astype(np.int32),
            "prompt_ids": np.arange(5, dtype=np.int32),
        }
        return Answer(**(fields | changes))

    return make


@pytest.fixture
def same() -> Callable[[Answer, Answer], bool]:
    def check(one: Answer, other: Answer) -> bool:
        plain = all(
            getattr(one, name) == getattr(other, name)
            for name in ("problem_id", "request_id", "epoch", "weights_version", "status", "reward")
        )
        return (
            plain
            and np.array_equal(one.token_ids, other.token_ids)
            and np.array_equal(one.prompt_ids, other.prompt_ids)
        )

    return check
