from vllm_specrollout.budgets.base import Price


def test_nothing_is_known_at_first() -> None:
    assert Price().of(8) == 0.0


def test_each_octave_of_requests_has_its_own_price_and_others_take_the_nearest_ones() -> None:
    price = Price()
    price.spent(1, 2.0)
    price.spent(16, 8.0)
    assert [price.of(n) for n in (1, 3, 4, 9, 16, 31, 500)] == [2.0, 2.0, 2.0, 8.0, 8.0, 8.0, 8.0]


def test_a_slow_first_time_is_soon_forgotten() -> None:
    price = Price()
    price.spent(4, 56.0)
    for _ in range(9):
        price.spent(5, 26.0)
    assert price.of(4) == 29.0


def test_a_price_that_changes_is_followed() -> None:
    price = Price()
    for ms in [2.0] * 100 + [4.0] * 30:
        price.spent(4, ms)
    assert 3.9 < price.of(4) < 4.0
