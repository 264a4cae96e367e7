"""A stream whose noise is counted from one seed."""

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.cluster.builders import OPEN, VERDICT, ints, seeds
from vllm_specrollout.cluster.messages import Noise, Open, Pace
from vllm_specrollout.cluster.stream import Choices, Stream, Survival

OPENED = replace(OPEN, token_ids=ints(5, 6, 7), seeds=seeds(-9), window=3, fan_out=1, pace=Pace.DECOUPLED)


def stream_of(opened: Open, noise: Noise = Noise.COUNTER) -> Stream:
    return Stream(opened, 100, 16, Survival(), noise)


def grow(stream: Stream) -> None:
    look = stream.look()
    stream.grow([Choices([40 + depth], [-0.1]) for depth in look.depths])


def test_each_row_has_the_requests_seed_and_a_place_of_its_own() -> None:
    stream = stream_of(OPENED)
    assert (stream.seed(0), stream.place(0)) == (-9, 2), "behind the third token"
    while stream.may_draft:
        grow(stream)
    assert stream.depth == 6, "two windows, whatever the number of seeds"
    look = stream.look()
    assert {stream.seed(depth) for depth in look.depths} == {-9}
    stream.take(replace(VERDICT, num_tokens=5, token_ids=ints(40, 41), seeds=seeds(-9), first_seed=5))
    assert (stream.seed(0), stream.seed(1), stream.place(0), stream.place(1)) == (-9, -9, 4, 5)


def test_on_a_tape_a_place_changes_nothing() -> None:
    stream = stream_of(replace(OPENED, seeds=seeds(1, 2)), Noise.TAPE)
    assert (stream.seed(0), stream.seed(1), stream.seed(2), stream.place(0)) == (1, 2, 0, 2)
    while stream.may_draft:
        grow(stream)
    assert stream.depth == 2, "no further than its noise is known"


@pytest.mark.parametrize("noise", [Noise.COUNTER, Noise.TAPE])
def test_a_request_without_a_seed_is_not_drafted_for_unless_it_is_greedy(noise: Noise) -> None:
    none = np.zeros(0, np.int64)
    assert not stream_of(replace(OPENED, seeds=none), noise).may_draft
    greedy = stream_of(replace(OPENED, seeds=none, temperature=0.0), noise)
    assert greedy.may_draft and greedy.seed(0) is None
