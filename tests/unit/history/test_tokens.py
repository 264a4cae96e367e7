"""What is promised of tokens at rest: the same ones come back, few bytes each, and damage is an error."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.history.tokens import MAX_TOKENS, decode_tokens, encode_tokens

ANY_INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
TOKENS = st.one_of(
    st.lists(st.integers(0, 3), max_size=200),
    st.lists(st.integers(0, 300), max_size=200),
    st.lists(st.integers(0, 150_000), max_size=60),
    st.lists(ANY_INT32, max_size=30),
    st.builds(lambda token, count: [token] * count, ANY_INT32, st.integers(0, 3000)),
).map(lambda values: np.array(values, np.int32))


def zipf(vocabulary: int, count: int, seed: int = 0) -> np.ndarray:
    """Tokens as frequent as words are, with ranks spread over all ids: the hardest case for a fixed code."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, vocabulary + 1)
    return rng.permutation(vocabulary)[rng.choice(vocabulary, count, p=share / share.sum())].astype(np.int32)


@given(TOKENS)
def test_the_same_tokens_come_back_however_they_lie_in_memory(token_ids):
    encoded = encode_tokens(token_ids)
    back = decode_tokens(encoded)
    assert back.dtype == np.int32 and np.array_equal(back, token_ids)
    assert encode_tokens(np.repeat(token_ids, 3)[::3]) == encoded


@pytest.mark.parametrize("count", [16, 500, 4000])
@pytest.mark.parametrize("vocabulary, most", [(150_000, 3.0), (32_000, 2.2), (256, 1.2), (40, 0.95)])
def test_a_token_costs_few_bytes(vocabulary, most, count):
    assert len(encode_tokens(zipf(vocabulary, count))) <= most * count


def test_uniform_tokens_of_a_large_vocabulary_cost_no_more_than_their_bits():
    token_ids = np.random.default_rng(1).integers(0, 150_000, 4000).astype(np.int32)
    assert len(encode_tokens(token_ids)) <= 18 / 8 * 4000 + 8


def test_repetition_costs_next_to_nothing():
    assert len(encode_tokens(np.tile(zipf(150_000, 200), 20))) < 0.5 * 4000


@given(st.binary(max_size=60))
def test_any_bytes_are_tokens_or_a_value_error(data):
    try:
        token_ids = decode_tokens(data)
    except ValueError:
        return
    assert token_ids.dtype == np.int32 and token_ids.size <= MAX_TOKENS


@given(TOKENS, st.data())
def test_a_shortened_encoding_is_an_error(token_ids, data):
    encoded = encode_tokens(token_ids)
    with pytest.raises(ValueError):
        decode_tokens(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@pytest.mark.parametrize("count", [MAX_TOKENS + 1, MAX_TOKENS, 1 << 33])
def test_a_count_that_the_bytes_cannot_hold_allocates_nothing(count):
    varint = bytearray()
    while count >= 0x80:
        varint.append(count & 0x7F | 0x80)
        count >>= 7
    varint.append(count)
    for first in (0x80 | 18, 18):
        with pytest.raises(ValueError):
            decode_tokens(bytes([first]) + bytes(varint) + bytes(20))


def test_an_answer_beyond_the_limit_is_refused():
    with pytest.raises(ValueError, match="above the"):
        encode_tokens(np.broadcast_to(np.int32(0), MAX_TOKENS + 1))
