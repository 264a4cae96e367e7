"""The coordinator's process: begun anew with patience, and given up at last."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_specrollout.cluster.child import MOST_RESTARTS
from vllm_specrollout.cluster.group import processes
from vllm_specrollout.cluster.group.coordinator import Rules
from vllm_specrollout.cluster.group.processes import CoordinatorProcess, end


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Begun:
    """Counts what is begun, and begins a line of Python in its place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.line = "raise SystemExit(3)"
        self.error: OSError | None = None
        self._begin = processes._begin
        monkeypatch.setattr(processes, "_begin", self)

    def __call__(self, argv: Any, environment: Any) -> Any:
        self.count += 1
        if self.error is not None:
            raise self.error
        return self._begin(["-S", "-c", self.line], environment)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    return Begun(monkeypatch)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def coordinator(begun: Begun, clock: Clock) -> Iterator[CoordinatorProcess]:
    one = CoordinatorProcess("ipc:///tmp/nowhere", Rules(), clock)
    yield one
    end([one.process])


def test_a_coordinator_that_always_ends_is_begun_anew_with_ever_more_patience_and_then_left(
    coordinator: CoordinatorProcess, begun: Begun, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(MOST_RESTARTS):
        coordinator.process.wait()
        coordinator.watch()
        clock.now += 2**number - 0.01
        coordinator.watch()
        assert begun.count == number + 1, "not at once"
        clock.now += 0.02
        coordinator.watch()
        assert begun.count == number + 2
    coordinator.process.wait()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            clock.now += 1000.0
            coordinator.watch()
    assert begun.count == MOST_RESTARTS + 1 and coordinator.is_given_up
    (record,) = caplog.records
    assert "ended with status 3, and was begun anew 5 times" in record.message


def test_a_host_without_room_for_a_coordinator_costs_a_try_and_no_batch(
    coordinator: CoordinatorProcess, begun: Begun, clock: Clock
) -> None:
    coordinator.process.wait()
    coordinator.watch()
    begun.error = OSError(errno.EAGAIN, "no process left")
    clock.now += 1.0
    coordinator.watch()
    assert begun.count == 2
    begun.error, begun.line = None, "import signal; signal.pause()"
    clock.now += 1.9
    coordinator.watch()
    assert begun.count == 2, "with more patience"
    clock.now += 0.1
    coordinator.watch()
    assert begun.count == 3 and coordinator.process.poll() is None


def test_a_host_that_never_has_room_is_asked_no_more_often(
    coordinator: CoordinatorProcess, begun: Begun, clock: Clock
) -> None:
    coordinator.process.wait()
    begun.error = OSError(errno.ENOMEM, "no memory left")
    for _ in range(20):
        clock.now += 1000.0
        coordinator.watch()
    assert coordinator.is_given_up and begun.count == MOST_RESTARTS + 1
