"""Promises to the makespan, and what became of them."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specrollout.policies.truth import Truth


def _after(truth: Truth, gained: list[int], steps: int, need: float = 40.0, weight: float | None = None) -> None:
    """All need as much, and are equally likely to end last; then they gain so many tokens in so many steps."""
    n = len(gained)
    names = [f"r{i}" for i in range(n)]
    truth.promise(dict.fromkeys(names, 10), np.full((n, 8), need), np.full(n, 1.0 / n if weight is None else weight))
    truth.close({name: 10 + tokens for name, tokens in zip(names, gained, strict=True)}, steps)


def test_a_lone_requests_promises_are_kept() -> None:
    truth = Truth()
    for _ in range(20):
        _after(truth, [12], steps=4)
    assert truth.share(1) == pytest.approx(1.0)


def test_tokens_that_leave_the_slowest_request_where_it_is_were_promised_in_vain() -> None:
    truth = Truth()
    for _ in range(100):
        _after(truth, [24, 24, 24, 4], steps=4)
    assert truth.share(4) < 0.1
    assert truth.share(64) == 1.0, "other batches are not judged by it"


def test_what_all_gain_alike_comes_true() -> None:
    truth = Truth()
    for _ in range(50):
        _after(truth, [8, 8, 8, 8], steps=4)
    assert truth.share(4) == pytest.approx(1.0)


def test_a_batch_that_promised_nothing_lately_is_believed_again() -> None:
    truth = Truth()
    for _ in range(100):
        _after(truth, [24, 4], steps=4)
    low = truth.share(2)
    for _ in range(300):
        _after(truth, [4, 4], steps=4)
    assert low < 0.2 and truth.share(2) > 0.9


def test_a_request_that_is_over_got_what_it_needed() -> None:
    truth = Truth()
    truth.promise({"short": 10, "long": 10}, np.asarray([[3.0, 3.0], [40.0, 40.0]]), np.asarray([0.0, 1.0]))
    truth.close({"long": 22}, 6)
    assert truth.share(2) == pytest.approx(1.0)
    assert truth._sums[2] == [6.0, 6.0]


def test_a_promise_is_closed_once() -> None:
    truth = Truth()
    _after(truth, [9, 3], steps=3)
    before = {size: list(sums) for size, sums in truth._sums.items()}
    truth.close({"r0": 99, "r1": 99}, 3)
    assert all(truth._sums[size][0] < sums[0] for size, sums in before.items()), "it fades, and nothing is added"
