import pytest
import torch

from vllm_specrollout.drafters.coupling import FIRST, MOST, WORST, Coupling, Likeliest


def flags(count: int, value: bool = False) -> torch.Tensor:
    return torch.full((count,), value)


def drawn(count: int, a: float, b: float, seed: int = 0) -> tuple[Likeliest, torch.Tensor]:
    """Rows, and the tokens of a target that takes them with probability softmax(a log q + b g)."""
    generator = torch.Generator().manual_seed(seed)
    rows = Likeliest.of(torch.randn(count, 40, generator=generator) * 2.5)
    uniform = torch.rand(count, rows.noise.shape[1] - 1, generator=generator).clamp(1e-9, 1 - 1e-7)
    rows.noise[:, :-1] = -(-uniform.log()).log()
    place = (a * rows.log_q + b * rows.noise).softmax(-1).multinomial(1, generator=generator)[:, 0]
    return rows, torch.cat([rows.tokens, torch.full((count, 1), -1)], dim=1).gather(1, place[:, None])[:, 0]


def learned(rows: Likeliest, taken: torch.Tensor, is_greedy: bool = False, of: Coupling | None = None) -> Coupling:
    coupling = of or Coupling()
    for begin in range(0, len(taken), 50):
        own = slice(begin, begin + 50)
        part = Likeliest(rows.tokens[own], rows.log_q[own], rows.noise[own])
        coupling.observe(part, flags(len(taken[own]), is_greedy), taken[own])
    return coupling


@pytest.mark.parametrize(("a", "b"), [(1.13, 0.19), (1.32, 0.47), (0.6, 0.0), (2.0, 1.5)])
def test_planted_weights_are_found(a: float, b: float) -> None:
    coupling = learned(*drawn(6000, a, b))
    assert coupling.sampled == pytest.approx((a, b), abs=0.12)


def test_of_greedy_requests_the_weight_of_the_noise_is_none_and_others_learn_nothing_of_them() -> None:
    rows, taken = drawn(4000, 1.5, 0.0)
    rows.noise[:] = 0.0
    coupling = learned(rows, taken, is_greedy=True)
    assert coupling.sampled == pytest.approx(FIRST)
    assert coupling._weights[0].tolist() == [pytest.approx(1.5, abs=0.15), 0.0]
    known = coupling.log_probabilities(rows, flags(len(taken), True))
    assert torch.allclose(known, (coupling._weights[0, 0] * rows.log_q).log_softmax(-1))


def test_a_copy_of_the_target_is_trusted_ever_more_and_its_token_is_the_one_drafted() -> None:
    rows, _ = drawn(4000, 1.0, 1.0)
    best = (rows.log_q + rows.noise)[:, :-1].argmax(dim=1)
    taken = rows.tokens.gather(1, best[:, None])[:, 0]
    coupling = learned(rows, taken)
    a, b = coupling.sampled
    assert 2.5 < a <= MOST and b / a == pytest.approx(1.0, abs=0.1)
    known = coupling.log_probabilities(rows, flags(len(taken)))
    assert (known[:, :-1].argmax(dim=1) == best).float().mean() > 0.98


def test_probabilities_are_those_by_which_tokens_are_taken() -> None:
    rows, taken = drawn(16000, 1.3, 0.5)
    coupling = learned(rows, taken)
    known = coupling.log_probabilities(rows, flags(len(taken))).exp()
    likely, place = known[:, :-1].max(dim=1)
    hit = rows.tokens.gather(1, place[:, None])[:, 0] == taken
    for tenth in range(10):
        own = (likely * 10).long() == tenth
        if own.sum() >= 1500:
            assert abs(float(likely[own].mean()) - float(hit[own].float().mean())) <= 0.03


def test_likely_tokens_alone_are_told_apart_and_the_rest_is_one() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0, float("-inf")]])
    rows = Likeliest.of(logits, most=2)
    q = logits.softmax(dim=-1)[0]
    assert rows.tokens.tolist() == [[0, 2]]
    assert torch.allclose(rows.log_q[0].exp(), torch.stack([q[0], q[2], q[1] + q[3]]))
    assert Likeliest.of(logits).log_q[0, -2:].tolist() == [WORST, WORST], "no token is left, and one cannot come"


def test_what_is_no_number_teaches_nothing() -> None:
    (rows, taken), none = drawn(100, 1.0, 0.5), flags(100)
    coupling = learned(rows, taken)
    before = coupling._weights.clone()
    bad = Likeliest(rows.tokens, torch.full_like(rows.log_q, torch.nan), rows.noise)
    coupling.observe(bad, none, taken)
    coupling.observe(rows, none, taken, none)
    assert torch.equal(coupling._weights, before)
    rows.log_q[3] = torch.nan
    coupling.observe(rows, none, taken)
    assert torch.isfinite(coupling._weights).all() and not torch.equal(coupling._weights, before)


def test_other_weights_of_a_model_begin_with_its_parents_and_are_learned_faster_than_a_drift() -> None:
    first, second = drawn(4000, 1.2, 0.2), drawn(300, 0.7, 0.8, seed=1)
    child, same = learned(*first), learned(*first)
    before = child.sampled
    child.fade()
    assert child.sampled == before
    moved = [abs(learned(*second, of=one).sampled[1] - 0.8) for one in (child, same)]
    assert moved[0] < 0.15 < moved[1]


def test_pinned_weights_stay_and_what_was_learned_comes_back() -> None:
    rows, taken = drawn(500, 1.2, 0.2)
    coupling = learned(rows, taken)
    before = coupling.sampled
    coupling.pin(1.0, 1.0)
    learned(rows, taken, of=coupling)
    known = coupling.log_probabilities(rows, flags(500))
    assert torch.allclose(known, (rows.log_q + rows.noise).log_softmax(-1))
    coupling.unpin()
    assert coupling.sampled == before
