"""Looks at the random states that an engine shares with its process, and at what requests without a seed draw."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from vllm import SamplingParams

from tests.e2e.identity.engines import Engine
from vllm_specrollout.worker.arriving import RequestSeeds

_PROMPT = [9, 40, 41, 42, 9, 40, 41]


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Inside, nobody draws from Python's, numpy's or torch's own random state, nor seeds it."""
    python, numpy, torch_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    assert random.getstate() == python
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy, strict=True))
    assert torch.equal(torch.get_rng_state(), torch_cpu)


def check_rollouts_leave_randomness_alone(ours: Engine) -> None:
    """One request and four, none of them with a seed, then some with: the process notices nothing.

    Those without a seed differ from each other, and have the same tokens whether they are drafted for or not.
    """
    seeded = [SamplingParams(temperature=1.0, seed=i, max_tokens=12, ignore_eos=True) for i in range(2)]
    found = {}
    for is_on in (True, False):
        scheduler = ours.llm.llm_engine.engine_core.engine_core.scheduler
        scheduler._arrivals._seeds = RequestSeeds(11)
        own = {"extra_args": {"spec_rollout": {"enabled": is_on}}}
        unseeded = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, **own)
        answers = []
        for params in ([unseeded], [unseeded] * 4, [seeded[0], unseeded, seeded[1]]):
            with untouched():
                prompts = [{"prompt_token_ids": _PROMPT}] * len(params)
                outputs = ours.llm.generate(prompts, params, use_tqdm=False)
            answers += [tuple(one.outputs[0].token_ids) for one in outputs]
        assert len(set(answers)) == 8, "they are to be independent"
        found[is_on] = answers
    assert found[True] == found[False]
