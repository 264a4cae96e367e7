"""Seeds of requests that come without one: the same on every rank, and nobody else's random state is touched."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams

from vllm_specrollout.worker.seeds import RequestSeeds


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


def test_only_who_has_no_seed_is_given_one_and_the_clients_parameters_stay_as_they_are() -> None:
    shared, seeded = SamplingParams(temperature=0.7), SamplingParams(seed=3)
    requests = [
        SimpleNamespace(req_id="a", sampling_params=shared),
        SimpleNamespace(req_id="b", sampling_params=seeded),
        SimpleNamespace(req_id="c", sampling_params=shared),
        SimpleNamespace(req_id="pooling", sampling_params=None),
    ]
    assert RequestSeeds(0).give(requests) == ["a", "c"]  # type: ignore[arg-type]
    first, second = requests[0].sampling_params, requests[2].sampling_params
    assert shared.seed is None and first.seed != second.seed and first.temperature == 0.7
    assert requests[1].sampling_params is seeded and seeded.seed == 3
