"""What is near enough to be a tie: by the logits' size and dtype, and by the temperature that they are divided by."""

import pytest

pytest.importorskip("torch")

from bench.runner import ties
from bench.runner.ties import Candidates, judged, tolerance


@pytest.mark.parametrize(
    ("dtype", "logit", "temperature", "allowed"),
    [
        ("bfloat16", 3.0, 1.0, 0.05),  # 2 * 2^-7 * 2 = 0.03: less than the least
        ("bfloat16", 16.0, 1.0, 0.25),
        ("bfloat16", -31.9, 0.0, 0.25),
        ("bfloat16", 32.0, 1.0, 0.5),
        ("bfloat16", 20.0, 0.5, 0.5),
        ("bfloat16", 0.0, 1.0, 0.05),
        ("bfloat16", float("-inf"), 1.0, 0.05),
        ("float32", 20.0, 1.0, 1e-4),
        ("float32", 2000.0, 1.0, 2.0 * 2.0**-23 * 1024),
    ],
)
def test_the_tolerance_is_two_units_in_the_last_place_of_the_logits_as_noise_meets_them(
    dtype, logit, temperature, allowed
):
    assert tolerance(dtype, logit, temperature) == pytest.approx(allowed)


@pytest.mark.parametrize(("apart", "is_tie"), [(0.2, True), (0.3, False)])
def test_large_logits_may_be_further_apart_than_small_ones(apart, is_tie):
    def greedy(logit):
        return Candidates(
            stock=3, ours=5, stock_logit=logit, our_logit=logit - apart, num_prompt=2, num_prefix=1, width=8
        )

    assert judged(greedy(20.0), None, 0.0, "bfloat16")[0] is is_tie
    assert not judged(greedy(2.0), None, 0.0, "bfloat16")[0]


def test_temperature_widens_the_tolerance_by_the_logit_before_it(monkeypatch):
    """A logit of 10 at temperature 0.5 is 20 where noise is added, and one unit of its last place 0.125."""
    one = Candidates(stock=3, ours=5, stock_logit=20.0, our_logit=19.8, num_prompt=2, num_prefix=1, width=8)
    monkeypatch.setattr(ties, "gap", lambda candidates, seed, temperature: 0.2)
    assert judged(one, 1, 0.5, "bfloat16") == (True, "2.0e-01 apart, 2.5e-01 allowed")
