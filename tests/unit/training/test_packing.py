import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.training.examples import example
from vllm_specrollout.training.buffer import batch_of, packed

lengths_of = st.lists(st.integers(2, 40), min_size=1, max_size=12)


@given(lengths_of, st.integers(1, 60), st.booleans())
def test_every_example_is_in_one_batch_and_no_batch_is_larger_than_asked(lengths, most, is_shuffled):
    generator = torch.Generator().manual_seed(3) if is_shuffled else None
    batches = list(packed(lengths, most, generator))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[i] - 1 for i in batch) <= most for batch in batches)


@given(lengths_of, st.data())
def test_each_place_pairs_a_token_with_the_hidden_state_before_it_and_the_targets_answer_to_it(lengths, data):
    prompts = [data.draw(st.integers(0, length - 1)) for length in lengths]
    num_levels, most = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 40))
    examples = [example(n, p, number=i) for i, (n, p) in enumerate(zip(lengths, prompts, strict=True))]
    batch = batch_of(examples, num_levels, most)
    place = 0
    for i, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        for token in range(1, min(length, most + 1)):
            assert batch.input_ids[0, place] == token + 10 * i
            assert batch.hidden_states[0, place, 0] == 1000 * i + token - 1
            assert batch.last_before[0, place, 0] == 1000 * i + token - 1 + 0.5
            assert batch.last_hidden[0, place, 0] == 1000 * i + token + 0.5
            assert batch.document_ids[0, place] == i and batch.position_ids[0, place] == token
            # a head that is asked k levels ahead here began k places before: in this example, not in another
            begins_here = token - 1 - (num_levels - 1) >= 0
            assert batch.loss_mask[0, place] == (token >= prompt and begins_here)
            place += 1
    assert batch.input_ids.shape == (1, place)
