"""The closed form against draws of noise, and against the sum it is a closed form of."""

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.training.match_rate import match_rate, match_rate_of

DRAWS = 20_000


def distributions(seed: int, size: int, sharp: float, apart: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two of them that resemble each other; some of their tokens are next to impossible."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator) * sharp
    other = logits + torch.randn(size, generator=generator) * apart
    return logits.softmax(dim=-1), other.softmax(dim=-1)


some = (st.integers(0, 1 << 20), st.integers(2, 30), st.floats(0.1, 6.0), st.floats(0.0, 3.0))


@given(*some)
def test_the_rate_is_how_often_drawn_noise_has_both_choose_the_same_token(seed, size, sharp, apart):
    p, q = distributions(seed, size, sharp, apart)
    uniform = torch.rand(DRAWS, size, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    noise = -torch.log(-torch.log(uniform.clamp(1e-12, 1 - 1e-12)))
    theirs, ours = ((one.double().log() + noise).argmax(dim=-1) for one in (p, q))
    is_met = (theirs == ours).double()
    # five standard deviations
    assert float(match_rate(p, q)) == pytest.approx(float(is_met.mean()), abs=5 * 0.5 / DRAWS**0.5)
    token = int(theirs.mode().values)
    chosen = is_met[theirs == token]
    found, share = float(match_rate_of(p, q, torch.tensor(token))), float(chosen.mean())
    assert found == pytest.approx(share, abs=5 * 0.5 / len(chosen) ** 0.5)


@given(*some)
def test_the_rates_of_all_tokens_add_up_to_the_rate(seed, size, sharp, apart):
    p, q = distributions(seed, size, sharp, apart)
    by_token = match_rate_of(p.expand(size, -1), q.expand(size, -1), torch.arange(size))
    assert float((p * by_token).sum()) == pytest.approx(float(match_rate(p, q)), abs=1e-4)
    naive = sum(1.0 / float(torch.maximum(p / p[i], q / q[i]).sum()) for i in range(size))
    assert float(match_rate(p, q)) == pytest.approx(naive, abs=1e-4)


def test_equal_distributions_always_match_and_disjoint_ones_never_do():
    p, q = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.25, 0.75])
    assert float(match_rate(p, p)) == pytest.approx(1.0) and float(match_rate(p, q)) == pytest.approx(0.0, abs=1e-6)
    likeliest = torch.tensor([0.0, 1.0, 0.0])
    assert float(match_rate(torch.tensor([0.2, 0.7, 0.1]), likeliest)) == pytest.approx(0.7)
