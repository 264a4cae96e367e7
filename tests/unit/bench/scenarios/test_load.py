"""The load patterns: who arrives when, and how long answers are."""

import pytest

from bench.scenarios.load import PATTERNS, pattern, tail_ratio


@pytest.mark.parametrize("name", PATTERNS)
def test_every_request_arrives_however_few_have_finished_before(name) -> None:
    made = pattern(name, 64, 96)
    assert len(made.lengths) == len(made.arrives_after)
    assert list(made.arrives_after) == sorted(made.arrives_after)
    assert all(after <= i for i, after in enumerate(made.arrives_after))
    assert 4 <= min(made.lengths) <= max(made.lengths) <= 96


def test_a_drain_has_a_long_tail_and_a_fill_ends_with_most_requests_running() -> None:
    assert tail_ratio(pattern("drain", 64, 96).lengths) < 0.5
    fill = pattern("fill", 64, 96)
    assert fill.arrives_after[0] == 0 and fill.arrives_after.count(0) == 1
    assert fill.lengths.count(96) >= 58
