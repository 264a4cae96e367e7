import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.trees.tape import SeedArray, SeedTape, VectorTape


class _Counter:
    """Draws 0, 1, 2, ... and counts how often it was asked."""

    def __init__(self) -> None:
        self.next = 0
        self.calls = 0

    def __call__(self, count: int) -> SeedArray:
        self.calls += 1
        self.next += count
        return np.arange(self.next - count, self.next, dtype=np.int64)


@given(st.lists(st.tuples(st.integers(1, 80), st.integers(0, 80)), max_size=40))
def test_peeking_ahead_never_shifts_what_a_token_gets(steps: list[tuple[int, int]]) -> None:
    tape, consumed = SeedTape(_Counter()), 0
    for ahead, used in steps:
        assert tape.peek(ahead).tolist() == list(range(consumed, consumed + ahead))
        used = min(ahead, used)
        tape.advance(used)
        consumed += used


@given(st.integers(0, 200), st.integers(1, 80))
def test_a_tape_that_skips_goes_on_where_another_one_ended(skipped: int, ahead: int) -> None:
    tape = SeedTape(_Counter())
    tape.skip(skipped)
    assert tape.peek(ahead).tolist() == list(range(skipped, skipped + ahead))
    count = iter(range(1000))
    vectors = VectorTape(lambda: next(count))
    vectors.skip(skipped)
    assert vectors.peek(ahead) == list(range(skipped, skipped + ahead))
    assert len(vectors._drawn) == ahead, "what is skipped is not kept"


def test_the_generator_is_asked_rarely() -> None:
    counter = _Counter()
    tape = SeedTape(counter)
    for _ in range(640):
        tape.peek(1)
        tape.advance(1)
    assert counter.calls == 10
