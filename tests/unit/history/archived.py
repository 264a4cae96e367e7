"""What tests of couriers and of archives bring and look for."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("zmq")

from vllm_specrollout.history.database import Database
from vllm_specrollout.history.mirrors import Mirrors, kind_of
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY
from vllm_specrollout.types import Answer, FinishReason

KIND = kind_of(ANY_VOCABULARY)
RUN = kind_of(ANY_VOCABULARY, "run")
ROOM = 1 << 30


def answer(request: str, problem: str = "p", epoch: int = 0, tokens: int = 3, reward: float | None = None) -> Answer:
    token_ids = np.arange(tokens, dtype=np.int32)
    return Answer(request, problem, token_ids[:2], token_ids, FinishReason.FINISHED, 0, epoch=epoch, reward=reward)


def all_of(mirrors: Mirrors) -> dict[str, Database]:
    return {name: mirrors.opened(name) for name in list(mirrors.known)}
