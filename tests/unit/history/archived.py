"""What tests of couriers and of archives bring and look for."""

import numpy as np

from vllm_specrollout.history.database import Database
from vllm_specrollout.history.mirrors import Mirrors, kind_of
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY
from vllm_specrollout.types import Answer, FinishReason, IntArray

KIND = kind_of(ANY_VOCABULARY)
RUN = kind_of(ANY_VOCABULARY, "run")
ROOM = 1 << 30


def answer(
    request: str, problem: str = "p", epoch: int = 0, tokens: int | IntArray = 3, reward: float | None = None
) -> Answer:
    token_ids = np.arange(tokens, dtype=np.int32) if isinstance(tokens, int) else tokens
    return Answer(request, problem, token_ids[:2], token_ids, FinishReason.FINISHED, 0, epoch=epoch, reward=reward)


def noise(count: int, seed: int = 0) -> IntArray:
    """Tokens that cannot be packed."""
    return np.random.default_rng(seed).integers(0, 1 << 30, count).astype(np.int32)


def file_of(node: int) -> str:
    return f"{node:016x}.answers-0000"


def all_of(mirrors: Mirrors) -> dict[str, Database]:
    return {name: mirrors.opened(name) for name in list(mirrors.known)}


def requests_in(mirrors: Mirrors) -> list[bytes]:
    return [row.request for mirror in all_of(mirrors).values() for row in mirror.rows()]
