"""A worker's loop: what it says, and when."""

from __future__ import annotations

import logging

import pytest

from tests.unit.cluster.group.builders import FakeEngine, Wire
from vllm_specrollout.cluster.group.member import BEAT_S, Member
from vllm_specrollout.cluster.group.messages import Call, Here, Message, Race, Report, Run, Want, decode, encode
from vllm_specrollout.errors import ConfigError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def driver() -> Wire:
    return Wire()


@pytest.fixture
def coordinator() -> Wire:
    return Wire()


@pytest.fixture
def member(driver: Wire, coordinator: Wire, clock: Clock) -> Member:
    return Member(FakeEngine("w0", seed=0), driver, coordinator, clock)


def told(wire: Wire, *messages: Message) -> None:
    wire.to_come += map(encode, messages)


def said(wire: Wire) -> list[Message]:
    taken, wire.out = wire.out, []
    return [decode(one) for one in taken]


def test_a_worker_says_once_that_it_is_there_and_then_nothing_until_it_is_called(
    member: Member, driver: Wire, clock: Clock
) -> None:
    member.turn()
    assert said(driver) == [Here(3)]
    for _ in range(1000):
        clock.now += BEAT_S
        member.turn()
    assert driver.out == [], "between two batches nobody would hear it"


def test_however_often_it_was_called_meanwhile_it_answers_once_with_all_that_it_runs(
    member: Member, driver: Wire
) -> None:
    member.turn()
    said(driver)
    told(driver, Call(1), Run("r7", (1,), {}), Call(2), Run("r8", (1,), {}))
    member.turn()
    assert [one for one in said(driver) if isinstance(one, Here)] == [Here(3, 2, ("r7", "r8"))]


def test_a_drafter_is_reported_while_it_can_draft_and_at_once(member: Member, coordinator: Wire, driver: Wire) -> None:
    def reported() -> list[str]:
        member.turn()
        return [one.drafter for one in said(coordinator) if isinstance(one, Report)]

    assert reported() == [""]
    told(driver, Call(1, has_drafter=False))
    assert reported() == []
    told(driver, Call(2, has_drafter=True))
    assert reported() == ["ipc:///tmp/w0"]
    told(driver, Call(3, has_drafter=True))
    assert reported() == []
    told(driver, Call(4, has_drafter=False))
    assert reported() == [""]


def test_a_command_that_cannot_be_followed_is_named_once_and_leaves_nothing(
    driver: Wire, coordinator: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    class Engine(FakeEngine):
        def draft_with(self, method: str) -> None:
            raise ConfigError(f"this engine has no drafter `{method}`", "it has: none")

    member = Member(Engine("w0", seed=0), driver, coordinator)
    member.turn()
    before = {name: len(own) for name, own in vars(member).items() if isinstance(own, list | dict | set)}
    with caplog.at_level(logging.WARNING):
        for i in range(1000):
            told(coordinator, Race(f"r{i}", "ngram"))
            member.turn()
    (record,) = caplog.records
    assert "cannot follow `race`: this engine has no drafter `ngram`" in record.message
    after = {name: len(own) for name, own in vars(member).items() if isinstance(own, list | dict | set)}
    assert sum(after.values()) <= sum(before.values()) + 1
    assert not [one for one in said(driver) if isinstance(one, Want)]
