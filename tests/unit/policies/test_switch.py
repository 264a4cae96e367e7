"""When drafting stops and starts again, and what asking for drafts costs."""

from __future__ import annotations

import pytest

from vllm_specrollout.policies.switch import MARGIN_ON, Asking, Switch


def test_a_single_step_that_does_not_pay_decides_nothing() -> None:
    switch = Switch()
    for _ in range(10):
        for _ in range(15):
            switch.judge(-0.01)
        assert switch.is_on
        switch.judge(0.2)
    for _ in range(15):
        switch.judge(-0.01)
    assert switch.is_on
    switch.judge(-0.01)
    assert not switch.is_on


def test_asking_in_vain_most_of_the_time_is_not_made_good_by_a_little_now_and_then() -> None:
    switch = Switch()
    for _ in range(4):
        for share in (-0.05, -0.05, -0.05, 0.1):
            switch.judge(share)
    assert not switch.is_on


def test_only_the_steps_of_a_pause_can_be_rested_through() -> None:
    switch = Switch()
    assert not switch.is_resting
    for _ in range(16):
        switch.judge(0.0)
    rested = 0
    while switch.is_resting:
        assert not switch.asks()
        rested += 1
    assert rested == 8 and switch.asks()


def test_pauses_grow_longer_as_long_as_nothing_pays() -> None:
    switch = Switch()
    for _ in range(16):
        switch.judge(0.0)
    pauses = []
    for _ in range(5):
        steps = 0
        while not switch.asks():
            steps += 1
        pauses.append(steps)
        switch.judge(0.0)
    assert pauses == [8, 16, 32, 64, 64]


def test_what_saves_next_to_nothing_does_not_start_it_again() -> None:
    switch = Switch(is_on=False)
    switch.judge(MARGIN_ON - 0.01)
    assert not switch.is_on
    switch.judge(MARGIN_ON + 0.01)
    assert switch.is_on


def test_asking_costs_what_it_took_lately_in_proportion_to_the_requests() -> None:
    asking = Asking()
    assert asking.predict(8) == 0.0
    asking.observe(4, 2.0)
    assert asking.predict(8) == pytest.approx(4.0)
    for _ in range(100):
        asking.observe(2, 0.2)
    assert asking.predict(8) == pytest.approx(0.8, rel=0.01)


def test_steps_in_which_nobody_was_asked_say_nothing_of_it() -> None:
    asking = Asking()
    asking.observe(4, 2.0)
    asking.observe(4, 0.0)
    asking.observe(0, 1.0)
    assert asking.predict(4) == pytest.approx(2.0)
