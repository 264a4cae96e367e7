from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.scheduling.lookahead import DraftAsk, granted, room_per_request

NUMBERS = st.integers(0, 10_000)


def room(most=32, *, running=1, waiting=False, tokens=8192):
    return room_per_request(most, num_running=running, has_waiting=waiting, max_tokens_per_step=tokens)


def test_a_large_batch_shares_the_steps_tokens_of_which_waiting_prompts_keep_half():
    assert room(running=4) == 32
    assert room(running=256) == 8192 // 256 - 1
    assert room(running=256, waiting=True) == 4096 // 256 - 1


@given(most=st.integers(1, 64), running=NUMBERS, waiting=st.booleans(), tokens=NUMBERS)
def test_room_never_takes_more_tokens_than_there_are(most, running, waiting, tokens):
    given_room = room(most, running=running, waiting=waiting, tokens=tokens)
    assert 0 <= given_room <= most
    if running and given_room:
        assert (2 if waiting else 1) * running * (1 + given_room) <= tokens


ASKS = st.lists(st.builds(DraftAsk, st.integers(0, 64), st.integers(0, 200)), max_size=12)


@given(asks=ASKS, spare=st.integers(-50, 40), size=st.sampled_from([1, 16, 32, 128]), kinds=st.integers(1, 3))
def test_drafts_take_no_block_that_is_not_spare_and_all_that_their_own_blocks_hold(asks, spare, size, kinds):
    tokens = granted(asks, spare, size, kinds)
    assert all(min(ask.wanted, ask.slack) <= most <= ask.wanted for ask, most in zip(asks, tokens, strict=True))
    taken = [max(0, -(-(most - ask.slack) // size)) for ask, most in zip(asks, tokens, strict=True)]
    assert kinds * sum(taken) <= max(spare, 0)
    if spare >= kinds * sum(-(-ask.wanted // size) for ask in asks):
        assert tokens == [ask.wanted for ask in asks], "with blocks to spare nothing is cut"


def test_spare_blocks_go_to_who_comes_first():
    asks = [DraftAsk(20, 4), DraftAsk(20, 20), DraftAsk(20, 4)]
    assert granted(asks, 1, 16) == [20, 20, 4]
    assert granted(asks, 0, 16) == [4, 20, 4]
    assert granted(asks, -3, 16) == [4, 20, 4]
