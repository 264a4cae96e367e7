"""Times by the device's clock, of a device that stands in: they are taken when they are there, and never waited for."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import torch

from vllm_specrollout.worker.v2.device_times import EVERY, DeviceTimes


class Stream:
    """A device that is behind the host: what was recorded happens when it is let go on."""

    def __init__(self):
        self.now, self.waiting = 0.0, []

    def goes_on(self, events, ms=1.0):
        for event in self.waiting[:events]:
            self.now += ms
            event.at = self.now
        del self.waiting[:events]


@pytest.fixture
def stream(monkeypatch):
    made = Stream()

    class Event:
        at = None

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            made.waiting.append(self)

        def query(self):
            return self.at is not None

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return made


def _steps(times, count):
    for _ in range(count):
        times.begin_step()
        for part in ("verify", "commit"):
            with times.of(part):
                pass


def test_a_part_is_taken_once_and_only_when_the_device_is_through_with_it(stream):
    times = DeviceTimes(torch.device("cuda"))
    _steps(times, EVERY)
    assert len(stream.waiting) == 4 and times.take() == []
    stream.goes_on(3, ms=2.0)
    assert times.take() == [("verify", 2.0)] and times.take() == []
    stream.goes_on(1, ms=5.0)
    assert times.take() == [("commit", 5.0)]


def test_one_step_in_so_many_is_timed(stream):
    times = DeviceTimes(torch.device("cuda"))
    _steps(times, 3 * EVERY - 1)
    assert len(stream.waiting) == 2 * 4


def test_where_the_device_is_the_host_there_are_no_times(stream):
    times = DeviceTimes(torch.device("cpu"))
    _steps(times, 2 * EVERY)
    assert not stream.waiting and times.take() == []
