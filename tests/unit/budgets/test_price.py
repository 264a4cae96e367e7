from vllm_specrollout.budgets.step_cost import CHEAP, Asking, Price


def test_each_octave_of_requests_has_its_own_price_and_others_take_the_nearest_ones() -> None:
    price = Price()
    assert price.of(8) == 0.0, "nothing is known at first"
    price.spent(1, 2.0)
    price.spent(16, 8.0)
    assert [price.of(n) for n in (1, 3, 4, 9, 16, 31, 500)] == [2.0, 2.0, 2.0, 8.0, 8.0, 8.0, 8.0]


def test_a_first_time_holds_what_is_done_once_and_counts_only_until_the_second() -> None:
    price = Price()
    price.spent(4, 56.0)
    assert price.of(4) == 56.0
    for ms in (20.0, 32.0):
        price.spent(5, ms)
    assert price.of(4) == 26.0


def test_prices_up_to_a_number_are_those_of_each() -> None:
    price = Price()
    for num_requests, ms in ((1, 2.0), (2, 3.0), (16, 8.0)):
        price.spent(num_requests, ms)
    for most in (0, 1, 2, 3, 7, 8, 40):
        assert price.up_to(most).tolist() == [price.of(n) for n in range(most + 1)]
    assert price.of(0) == 0.0


def test_a_first_time_does_not_count_where_another_octave_is_known_better() -> None:
    price = Price()
    for ms in (9.0, 2.0):
        price.spent(1, ms)
    price.spent(8, 900.0)
    assert price.of(8) == 2.0
    price.spent(8, 3.0)
    assert price.of(8) == 3.0


def test_a_price_that_changes_is_followed() -> None:
    price = Price()
    for ms in [2.0] * 100 + [4.0] * 30:
        price.spent(4, ms)
    assert 3.9 < price.of(4) < 4.0


def test_expensive_is_what_takes_more_than_a_small_share_of_a_step_whose_time_is_known() -> None:
    price = Price()
    price.spent(2, 1.0)
    assert price.is_expensive(2, 0.9 / CHEAP) and not price.is_expensive(2, 1.1 / CHEAP)
    assert not price.is_expensive(2, 0.0) and not Price().is_expensive(2, 1e-9)


def test_asking_takes_the_prices_of_those_asked_in_the_step() -> None:
    asking = Asking()
    asking.spent("history", 2, 0.5)
    asking.spent("model", 2, 2.0)
    assert asking.ms == 2.5
    asking.ms = 0.0
    asking.spent("history", 2, 0.5)
    assert asking.ms == 0.5
