"""Which messages make sense, whoever made them."""

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.cluster.builders import BEAT, DRAFTS, ONE_OF_EACH, OPEN, VERDICT, floats, ints, seeds
from vllm_specrollout.cluster.messages import (
    MAX_NODES,
    MAX_SEEDS,
    MAX_TOKENS,
    Fault,
    Message,
    MessageError,
    validate,
)

NAN, INF = float("nan"), float("inf")


def chain(size: int) -> Message:
    return replace(
        DRAFTS,
        token_ids=np.zeros(size, np.int32),
        parents=np.arange(-1, size - 1, dtype=np.int32),
        log_q=np.zeros(size, np.float32),
    )


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_a_message_of_each_kind_makes_sense(message: Message) -> None:
    validate(message)


@pytest.mark.parametrize(
    ("message", "fault", "words"),
    [
        (replace(OPEN, token_ids=ints()), Fault.COUNT, "no tokens"),
        (replace(OPEN, token_ids=ints(5, -1)), Fault.VOCABULARY, "token id -1, below 0"),
        (replace(OPEN, token_ids=np.zeros(MAX_TOKENS + 1, np.int32)), Fault.COUNT, f"above {MAX_TOKENS}"),
        (replace(OPEN, token_ids=seeds(5)), Fault.VALUE, "int64 of 1 dimensions, not int32"),
        (replace(OPEN, token_ids=ints(5).reshape(1, 1)), Fault.VALUE, "int32 of 2 dimensions"),
        (replace(OPEN, token_ids=[5]), Fault.VALUE, "list, not int32"),
        (replace(OPEN, seeds=np.zeros(MAX_SEEDS + 1, np.int64)), Fault.COUNT, f"above {MAX_SEEDS}"),
        (replace(OPEN, temperature=NAN), Fault.VALUE, "`temperature` nan"),
        (replace(OPEN, temperature=INF), Fault.VALUE, "`temperature` inf"),
        (replace(OPEN, temperature=-0.5), Fault.VALUE, "`temperature` -0.5, outside 0 to inf"),
        (replace(OPEN, top_p=0.0), Fault.VALUE, "`top_p` 0.0"),
        (replace(OPEN, top_p=1.01), Fault.VALUE, "`top_p` 1.01, outside 0 to 1"),
        (replace(OPEN, min_p=NAN), Fault.VALUE, "`min_p` nan"),
        (replace(VERDICT, num_tokens=1), Fault.COUNT, "brings 2 tokens of a request that has 1"),
        (replace(VERDICT, token_ids=ints(-5)), Fault.VOCABULARY, "token id -5"),
        (replace(BEAT, busy_ms=NAN), Fault.VALUE, "`busy_ms` nan"),
        (replace(BEAT, busy_ms=-1.0), Fault.VALUE, "`busy_ms` -1.0"),
        (replace(DRAFTS, parents=ints(-1, 1, 0, 2)), Fault.TREE, "node 1 below node 1"),
        (replace(DRAFTS, parents=ints(-1, 0, 3, 2)), Fault.TREE, "node 2 below node 3"),
        (replace(DRAFTS, parents=ints(-2, 0, 0, 2)), Fault.TREE, "node 0 below node -2"),
        (replace(DRAFTS, parents=ints(-1, 0, 0)), Fault.COUNT, "4 tokens, 3 parents and 4 probabilities"),
        (replace(DRAFTS, log_q=floats(0.0)), Fault.COUNT, "and 1 probabilities"),
        (replace(DRAFTS, log_q=floats(0.0, NAN, 0.0, 0.0)), Fault.VALUE, "`log_q` nan"),
        (replace(DRAFTS, log_q=floats(0.0, 0.0, -INF, 0.0)), Fault.VALUE, "`log_q` -inf"),
        (replace(DRAFTS, log_q=floats(0.0, 0.0, 0.0, 0.5)), Fault.VALUE, "`log_q` 0.5"),
        (chain(MAX_NODES + 1), Fault.COUNT, f"{MAX_NODES + 1} `token_ids`, above {MAX_NODES}"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(message: Message, fault: Fault, words: str) -> None:
    with pytest.raises(MessageError) as caught:
        validate(message)
    assert caught.value.fault is fault
    assert words in caught.value.cause and type(message).__name__ in caught.value.cause


def test_as_many_nodes_as_allowed_make_sense() -> None:
    validate(chain(MAX_NODES))
    validate(chain(0))
