"""The noise of vLLM's V1 sampler on CPU: whatever the steps, the k-th token of a request gets its k-th integer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specrollout.worker.v1.sampler import AHEAD, SeedNoise

GREEDY = 2  # this request has no tape
REQUESTS = range(5)
# which requests are in the batch, whether it is that of the step before, what is drafted, and who is still in a prompt
STEP = st.tuples(
    st.lists(st.sampled_from(REQUESTS), min_size=1, unique=True),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 3)),
    st.sets(st.sampled_from(REQUESTS), max_size=1),
    st.booleans(),
)


def _integers(request: int, count: int) -> list[int]:
    """What stock vLLM draws for a request, one by one."""
    generator = torch.Generator().manual_seed(request)
    return [int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)) for _ in range(count)]


EXPECTED = {request: _integers(request, 600) for request in REQUESTS}


@settings(deadline=None, max_examples=60)
@given(st.lists(STEP, min_size=1, max_size=60))
def test_each_token_gets_the_integer_of_its_place_whatever_the_steps_were(steps: list[Any]) -> None:
    noise = SeedNoise("raw_logprobs")
    entries: dict[int, Any] = {
        request: SimpleNamespace(tape=None if request == GREEDY else noise.tape(torch.Generator().manual_seed(request)))
        for request in REQUESTS
    }
    kept = dict.fromkeys(REQUESTS, 0)
    batch: list[Any] = []
    names: list[int] = []
    for others, is_same, drafted, in_prompt, looks_ahead in steps:
        if not (is_same and batch):
            names, batch = others, [entries[name] for name in others]
        is_discarded = np.array([name in in_prompt for name in names], np.bool_)
        if drafted is None:
            noise.set_roots(batch)
            depths, counts = {name: [0] for name in names}, None
        else:
            depths = {name: list(range(drafted + 1)) for name in names}
            starts = np.arange(len(names) + 1, dtype=np.int32) * drafted
            noise.set_nodes(batch, starts, np.tile(np.arange(drafted + 1, dtype=np.int32), len(names)))
            counts = np.full(len(names), drafted + 1, np.int32)
        assert noise.sampler.seeds is not None
        expected = [0 if n == GREEDY else EXPECTED[n][kept[n] + depth] for n in names for depth in depths[n]]
        assert noise.sampler.seeds.tolist() == expected
        noise.keep(batch, counts, is_discarded)
        for name, left in zip(names, is_discarded.tolist(), strict=True):
            kept[name] += 0 if left else (1 if counts is None else int(counts[0]))
        if looks_ahead:  # a model that drafts does
            noise.ahead(torch.zeros(len(names), 4, dtype=torch.int64), batch, 1)


def test_a_batch_that_stays_is_looked_at_once_in_many_steps() -> None:
    noise, looks = SeedNoise("raw_logprobs"), []
    tape = noise.tape(torch.Generator().manual_seed(1))
    peek, counted = tape.peek, SimpleNamespace(advance=tape.advance)
    counted.peek = lambda count: looks.append(count) or peek(count)  # type: ignore[func-returns-value]
    batch: Any = [SimpleNamespace(tape=counted)]
    for step in range(2 * AHEAD):
        noise.set_roots(batch)
        assert noise.sampler.seeds is not None and noise.sampler.seeds.tolist() == [EXPECTED[1][step]]
        noise.keep(batch, None, np.zeros(1, np.bool_))
    assert looks == [AHEAD, AHEAD]
