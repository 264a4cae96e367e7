"""Seeds of requests that come without one: the same on every rank, and nobody else's random state is touched."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from vllm_specrollout.worker.arriving import RequestSeeds


def test_ranks_agree_and_engines_of_a_data_parallel_group_do_not() -> None:
    one, other = RequestSeeds(7), RequestSeeds(7)
    drawn = [one.draw() for _ in range(100)]
    assert drawn == [other.draw() for _ in range(100)] and len(set(drawn)) == 100
    assert all(0 <= seed < 2**62 for seed in drawn)
    assert drawn[0] not in (RequestSeeds(8).draw(), RequestSeeds(7, 1).draw(), RequestSeeds(-7).draw())


def test_drawing_leaves_the_processs_own_states_alone() -> None:
    random_state, numpy_state, torch_state = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    for _ in range(100):
        RequestSeeds(0).draw()
    assert random.getstate() == random_state
    assert (np.random.get_state()[1] == numpy_state).all()
    assert torch.equal(torch.get_rng_state(), torch_state)
