"""What is near enough to be a tie: by the logits' size and dtype, and by the temperature that they are divided by."""

import pytest

pytest.importorskip("torch")

from bench.runner import ties
from bench.runner.ties import TieCandidates, judged, tolerance


@pytest.mark.parametrize(
    ("dtype", "logits", "temperature", "allowed"),
    [
        ("bfloat16", [1.5, -0.5], 1.0, 0.05),  # 2 * 2^-7 * (1 + 1/2) = 0.02: less than the least
        ("bfloat16", [16.0, 31.0], 1.0, 0.5),
        ("bfloat16", [-31.9, 2.0], 0.0, 0.25 + 2.0 * 2.0**-7 * 2.0),
        ("bfloat16", [20.0, 20.0], 0.5, 1.0),
        ("bfloat16", [0.0, 0.0], 1.0, 0.05),
        ("bfloat16", [float("-inf"), 16.0], 1.0, 0.25),
        ("float32", [20.0, 20.0], 1.0, 1e-4),
        ("float32", [2000.0, 2000.0], 1.0, 4.0 * 2.0**-23 * 1024),
    ],
)
def test_each_logit_may_be_off_by_two_units_in_its_last_place_as_noise_meets_it(dtype, logits, temperature, allowed):
    assert tolerance(dtype, logits, temperature) == pytest.approx(allowed)


@pytest.mark.parametrize(("apart", "is_tie"), [(0.4, True), (0.6, False)])
def test_large_logits_may_be_further_apart_than_small_ones(apart, is_tie):
    def greedy(logit):
        return TieCandidates(
            stock=3, ours=5, stock_logit=logit, our_logit=logit - apart, num_prompt=2, num_prefix=1, width=8
        )

    assert judged(greedy(20.0), None, 0.0, "bfloat16")[0] is is_tie
    assert not judged(greedy(2.0), None, 0.0, "bfloat16")[0]


def test_temperature_widens_the_tolerance_by_the_logit_before_it(monkeypatch):
    """A logit of 10 at temperature 0.5 is 20 where noise is added, and one unit of its last place 0.125 there."""
    one = TieCandidates(stock=3, ours=5, stock_logit=20.0, our_logit=19.8, num_prompt=2, num_prefix=1, width=8)
    monkeypatch.setattr(ties, "gap", lambda candidates, seed, temperature: 0.4)
    assert judged(one, 1, 0.5, "bfloat16") == (True, "4.0e-01 apart, 5.0e-01 allowed")
