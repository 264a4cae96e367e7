"""What prompts cost, from made steps: 12 ms, 0.2 ms for each row, and 0.1 ms for each row of a prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drafters import nothing_accepted
from vllm_specrollout.cluster.ladder import GroupPrices
from vllm_specrollout.cluster.prefills import Prefills
from vllm_specrollout.types import StepRecord, StepTiming, empty_trees


def step(own: Prefills, batch: int, *, prompts: int = 0, nodes: int = 0) -> None:
    """A step of so many requests, in which so many tokens of prompts are computed beside."""
    rows, ms = batch + nodes + prompts, 12.0 + 0.2 * (batch + nodes) + 0.1 * prompts
    timing = StepTiming(batch, rows, nodes, 0, batch, ms, not prompts)
    own.stepped(StepRecord(None, empty_trees([]), nothing_accepted(0), timing))


def test_prompts_that_are_given_at_once_cost_their_rows_and_not_the_queue() -> None:
    own = Prefills()
    # 48 prompts of 21 tokens, in steps of 256 rows at most
    for size in (12, 24, 36, 48):
        step(own, size, prompts=240)
    assert own.tokens == 0, "nobody knows yet what a step without prompts takes"
    for _ in range(20):
        step(own, 48)
    assert own.tokens == 960
    assert own.seconds / own.tokens == pytest.approx(0.1e-3, rel=0.3)


def test_a_prompt_beside_requests_that_run_costs_what_it_adds() -> None:
    own = Prefills()
    for _ in range(20):
        step(own, 8, nodes=16)
    step(own, 9, prompts=500, nodes=16)
    assert own.tokens == 500 and own.seconds / 500 == pytest.approx(0.1e-3, rel=0.1)


def test_steps_without_prompts_cost_prompts_nothing() -> None:
    own = Prefills()
    for _ in range(50):
        step(own, 4, nodes=8)
    own.stepped(StepRecord(None, empty_trees([]), nothing_accepted(0), None))
    assert (own.tokens, own.seconds) == (0, 0.0)


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0.0, 60.0)), min_size=1, max_size=100))
def test_the_price_is_one_that_was_measured_and_half_of_the_tokens_cost_no_less(seen) -> None:
    prices = GroupPrices()
    for tokens, seconds in seen:
        prices.filled(tokens, seconds)
    price = prices.prefill_s(1)
    kept = seen[-GroupPrices.KEPT :]
    assert price in [seconds / tokens for tokens, seconds in kept]
    half = sum(tokens for tokens, _ in kept) / 2
    assert sum(tokens for tokens, seconds in kept if seconds / tokens <= price) >= half
    assert sum(tokens for tokens, seconds in kept if seconds / tokens >= price) >= half
