from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.policies.room import LONGEST_PAUSE, PATIENCE, Pause, room_per_request

NUMBERS = st.integers(0, 10_000)


def room(most=32, *, running=1, waiting=False, tokens=8192, blocks=1000, block_size=16):
    return room_per_request(
        most,
        num_running=running,
        has_waiting=waiting,
        max_tokens_per_step=tokens,
        num_free_blocks=blocks,
        block_size=block_size,
    )


def test_a_small_batch_gets_all_that_is_configured():
    assert room(running=4) == 32


def test_a_large_batch_shares_the_steps_tokens():
    assert room(running=256, blocks=10_000) == 8192 // 256 - 1


def test_waiting_prompts_keep_half_of_the_steps_tokens():
    assert room(running=256, waiting=True, blocks=10_000) == 4096 // 256 - 1


def test_waiting_prompts_keep_half_of_the_free_blocks():
    assert room(running=100, blocks=200) == 16
    assert room(running=100, blocks=200, waiting=True) == 0
    assert room(running=100, blocks=400, waiting=True) == 16


def test_without_free_blocks_there_is_no_room():
    assert room(running=4, blocks=3) == 0


@given(most=st.integers(1, 64), running=NUMBERS, waiting=st.booleans(), tokens=NUMBERS, blocks=NUMBERS)
def test_room_never_takes_more_tokens_or_blocks_than_there_are(most, running, waiting, tokens, blocks):
    given_room = room(most, running=running, waiting=waiting, tokens=tokens, blocks=blocks)
    assert 0 <= given_room <= most
    if running and given_room:
        assert running * (1 + given_room) <= tokens
        assert running * -(-given_room // 16) <= blocks
        if waiting:
            assert 2 * running * (1 + given_room) <= tokens
            assert 2 * running * -(-given_room // 16) <= blocks


def test_trying_in_vain_is_paused_for_longer_and_longer():
    pause, step, pauses = Pause(), 0, []
    for _ in range(PATIENCE + 8):
        assert pause.is_over(step)
        pause.tried(step, has_drafted=False)
        begin = step
        while not pause.is_over(step):
            step += 1
        pauses.append(step - begin)
    assert pauses[: PATIENCE - 1] == [0] * (PATIENCE - 1)
    assert pauses[PATIENCE - 1 :] == sorted(pauses[PATIENCE - 1 :]) and pauses[-1] == LONGEST_PAUSE


def test_a_draft_ends_all_pauses():
    pause = Pause(dry=PATIENCE + 3)
    pause.tried(100, has_drafted=True)
    assert pause.is_over(100) and pause.dry == 0
