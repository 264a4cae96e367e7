"""Looks at the random states that an engine shares with its process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from vllm import SamplingParams

from tests.e2e.identity.engines import Engine


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Inside, nobody draws from Python's, numpy's or torch's own random state, nor seeds it."""
    python, numpy, torch_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    assert random.getstate() == python
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy, strict=True))
    assert torch.equal(torch.get_rng_state(), torch_cpu)


def check_unseeded_requests_leave_randomness_alone(ours: Engine) -> None:
    """One request and four, none of them with a seed: they differ, and the process notices nothing."""
    answers = []
    for count in (1, 4):
        params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
        prompts = [{"prompt_token_ids": [9, 40, 41, 42, 9, 40, 41]}] * count
        with untouched():
            found = ours.llm.generate(prompts, [params] * count, use_tqdm=False)
        answers += [tuple(one.outputs[0].token_ids) for one in found]
    assert len(set(answers)) == 5, "they are to be independent"
