"""The engine behind `train-head`: rows of several answers in one pass, and of one answer in several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM

import bench
from vllm_specrollout.server.head_rows import PrefillEngine, _Parts
from vllm_specrollout.training.answers import KeptAnswer

POLICY = Path(bench.__path__[0]) / "policy" / "checkpoint"
LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def engine() -> Iterator[PrefillEngine]:
    # few tokens a pass, so that answers are cut
    one = PrefillEngine(dtype="float32", max_num_batched_tokens=64, max_num_seqs=8)
    yield one
    one.close()


def answers_of(*lengths: int) -> list[KeptAnswer]:
    draws = np.random.default_rng(0)
    return [KeptAnswer(draws.integers(4, 400, length).astype(np.int32), 3, i) for i, length in enumerate(lengths)]


def test_rows_are_what_transformers_computes_however_answers_share_passes(engine: PrefillEngine) -> None:
    answers = answers_of(5, 9, 130, 40, 40, 7, 90)
    # two that begin alike are told apart, and one that is there twice is computed once
    answers += [KeptAnswer(np.append(answers[0].token_ids[:-1], 3).astype(np.int32), 3, 7), answers[1]]
    reference = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
    found = {tuple(one.token_ids.tolist()): one for one in engine(POLICY, LAYERS, answers)}
    assert set(found) == {tuple(one.token_ids.tolist()) for one in answers}
    for answer in answers:
        rows = found[tuple(answer.token_ids.tolist())]
        with torch.no_grad():
            out = reference.model(torch.from_numpy(answer.token_ids).long()[None], output_hidden_states=True)
        states = [*(out.hidden_states[layer][0] for layer in LAYERS), out.last_hidden_state[0]]
        assert rows.prompt_tokens == answer.prompt_tokens
        torch.testing.assert_close(rows.hidden, torch.stack(states, dim=1), atol=1e-4, rtol=1e-4)


def test_an_answer_beyond_the_engines_room_begins_another_one_and_has_all_its_rows(engine: PrefillEngine) -> None:
    (long,) = answers_of(4200)
    longest = AutoModelForCausalLM.from_pretrained(POLICY).config.max_position_embeddings
    (rows,) = engine(POLICY, LAYERS, [long])
    assert len(rows.token_ids) == len(rows.hidden) == min(4200, longest - 1)


def test_a_hook_that_nobody_asked_for_rows_keeps_none_and_hands_on_what_a_runner_expects() -> None:
    parts, last = _Parts(), torch.zeros(2, 4)
    assert parts.take(None, (), {}, (last, [last])) is last and list(parts.end()) == []
