import numpy as np

from vllm_specrollout.drafters.levels import CHOICES, FIRST, Sharpness


def hits(*chosen: int) -> np.ndarray:
    """[positions, CHOICES] one candidate meets the target at each position."""
    return np.eye(len(CHOICES), dtype=np.bool_)[list(chosen)]


def test_before_anything_is_known_the_first_guess_is_used() -> None:
    assert Sharpness().value == CHOICES[FIRST]


def test_the_candidate_that_meets_the_target_most_often_is_used() -> None:
    sharpness = Sharpness()
    sharpness.observe(hits(0, 3, 3, 1))
    assert sharpness.value == CHOICES[3]


def test_a_target_that_changes_is_followed() -> None:
    sharpness = Sharpness()
    sharpness.observe(hits(*[0] * 500))
    sharpness.observe(hits(*[4] * 1000))
    assert sharpness.value == CHOICES[4]


def test_with_other_weights_what_was_learned_is_where_the_next_begins_and_is_soon_outweighed() -> None:
    sharpness = Sharpness()
    sharpness.observe(hits(*[0] * 500))
    sharpness.renew()
    assert sharpness.value == CHOICES[0]
    sharpness.observe(hits(*[4] * 25))
    assert sharpness.value == CHOICES[4]


def test_where_all_candidates_agree_the_first_guess_stays() -> None:
    sharpness = Sharpness()
    sharpness.observe(np.ones((50, len(CHOICES)), dtype=np.bool_))
    assert sharpness.value == CHOICES[FIRST]
