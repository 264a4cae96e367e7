"""Of what schedules may bring about, those that are run in every change bring all of it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults.breaking import DRAFTER_FAULTS, Errs, drawn
from tests.faults.schedule import ACTS, Schedule
from tests.faults.seeds import ON_ENGINES, ON_HOSTS, over_engine


def broken_by(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """What it breaks, and how; nothing further breaks in a drafter that is broken."""
    is_broken = False
    for act in schedule.acts:
        if act.what == "break a drafter":
            part, fault = drawn(act.chance())
            if part == "budget" or not is_broken:
                yield part, fault
            is_broken = is_broken or part == "drafter"
        elif act.what in ("mend", "recover"):
            is_broken = False


def test_every_act_and_every_fault_occurs_in_some_schedule_without_an_engine() -> None:
    schedules = [Schedule.of(seed) for seed in range(ON_HOSTS)]
    assert {act.what for schedule in schedules for act in schedule.acts} == set(ACTS)
    broken = {one for schedule in schedules for one in broken_by(schedule)}
    assert broken == {("drafter", fault) for fault in DRAFTER_FAULTS} | {("budget", one) for one in (*Errs.METHODS, "")}


def test_every_act_occurs_in_some_schedule_over_an_engine() -> None:
    schedules = [over_engine(seed) for seed in range(ON_ENGINES)]
    assert {act.what for schedule in schedules for act in schedule.acts} == set(ACTS)
