"""The noise of vLLM's V1 sampler before 0.32: the tape, the verdict, and the tokens of sampling one at a time.

The naive loop is stock's own `random_sample`, one token after another with the request's generator.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.sample.ops.topk_topp_sampler import random_sample

from vllm_specrollout import _core
from vllm_specrollout.trees.batch import chains as make_chains
from vllm_specrollout.worker.v1.sampler import ExponentialNoise, row_layout

VOCAB = 7
LENGTH = 12


def _logits(request: int, history: list[int]) -> torch.Tensor:
    """[vocab] a target that depends on the whole history."""
    seed = hash((request, *history)) % 2**31
    return torch.from_numpy(np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)) * 2


def _one_by_one(seeds: list[int]) -> list[list[int]]:
    """Stock: all requests in one batch, a token each per step."""
    generators = {i: torch.Generator().manual_seed(seed) for i, seed in enumerate(seeds)}
    out: list[list[int]] = [[] for _ in seeds]
    for _ in range(LENGTH):
        logits = torch.stack([_logits(i, history) for i, history in enumerate(out)])
        for history, token in zip(out, random_sample(logits.softmax(-1), generators).tolist(), strict=True):
            history.append(token)
    return out


def _drafted(seeds: list[int], truth: list[list[int]], rng: np.random.Generator) -> tuple[list[list[int]], int]:
    """Ours: chains that are right for a while, or wrong; returns the tokens and the steps it took."""
    noise = ExponentialNoise("raw_logprobs", VOCAB)
    entries: Any = [SimpleNamespace(tape=noise.tape(torch.Generator().manual_seed(seed))) for seed in seeds]
    out: list[list[int]] = [[] for _ in seeds]
    steps = 0
    while min(map(len, out)) < LENGTH:
        steps += 1
        chains = []
        for history, answer in zip(out, truth, strict=True):
            chain = answer[len(history) : len(history) + int(rng.integers(0, 6))]
            chains.append([t if rng.random() < 0.8 else int(rng.integers(VOCAB)) for t in chain])
        trees = make_chains([str(seed) for seed in seeds], chains)
        if trees.num_nodes:
            rows = [_logits(i, out[i] + c[:n]) for i, c in enumerate(chains) for n in range(len(c) + 1)]
            _, depths = row_layout(trees)
            noise.set_nodes(entries, trees.node_start, depths)
            sampled, _ = noise.sampler(torch.stack(rows), {}, None, None)
            output, _, num_accepted, _ = _core.walk(trees.node_start, trees.parents, trees.token_ids, sampled.numpy())
            kept, counts = num_accepted + 1, (num_accepted + 1).tolist()
        else:
            noise.set_roots(entries)
            sampled, _ = noise.sampler(torch.stack([_logits(i, h) for i, h in enumerate(out)]), {}, None, None)
            output, kept, counts = sampled.numpy()[:, None], None, [1] * len(seeds)
        noise.keep(entries, kept, np.zeros(len(seeds), np.bool_))
        for history, row, count in zip(out, output, counts, strict=True):
            history += row[:count].tolist()
    return [history[:LENGTH] for history in out], steps


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4), st.integers(0, 2**31 - 1))
def test_whatever_is_drafted_the_tokens_are_those_of_sampling_one_at_a_time(seeds: list[int], draft_seed: int) -> None:
    truth = _one_by_one(seeds)
    tokens, steps = _drafted(seeds, truth, np.random.default_rng(draft_seed))
    assert tokens == truth
    assert steps <= LENGTH


def test_the_noise_of_another_position_would_be_noticed() -> None:
    truth = _one_by_one([1, 2, 3])
    noise = ExponentialNoise("raw_logprobs", VOCAB)
    tapes = [noise.tape(torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]
    for tape in tapes:
        tape.peek(1)
        tape.advance(1)
    noise.set_roots([SimpleNamespace(tape=tape) for tape in tapes])  # type: ignore[misc]
    shifted = [noise.sampler(torch.stack([_logits(i, []) for i in range(3)]), {}, None, None)[0].tolist()]
    assert shifted != [[answer[0] for answer in truth]]


def test_greedy_rows_get_noise_that_no_division_minds() -> None:
    noise = ExponentialNoise("raw_logprobs", VOCAB)
    entries: Any = [SimpleNamespace(tape=None), SimpleNamespace(tape=noise.tape(torch.Generator()))]
    noise.set_nodes(entries, np.array([0, 2, 3], np.int32), np.array([0, 1, 2, 0, 1], np.int32))
    assert noise.sampler.noise is not None and noise.sampler.noise.shape == (5, VOCAB)
    assert (noise.sampler.noise > 0).all()


@pytest.mark.parametrize("vocab_size", [1, 401, 40_003], ids=lambda n: f"V{n}")
def test_the_tapes_vectors_are_bit_for_bit_what_stock_draws_into_its_rows(vocab_size: int) -> None:
    noise = ExponentialNoise("raw_logprobs", vocab_size)
    ours = noise.tape(torch.Generator().manual_seed(9)).peek(3)
    generator = torch.Generator().manual_seed(9)
    for vector in ours:
        rows = torch.empty(3, vocab_size)
        rows[1].exponential_(generator=generator)
        assert torch.equal(rows[1], vector)
