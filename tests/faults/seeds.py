"""Which schedules are run, and how one is run again."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.faults.schedule import Schedule

ON_HOSTS, ON_ENGINES = 100, 20
"""Schedules without an engine, and over one."""
ONE, TIMES = "SPECROLLOUT_SEED", "SPECROLLOUT_SCHEDULES"


def seeds(count: int) -> list[int]:
    """So many from 0 on, or as many times more as the environment says; or the one that it names."""
    asked = os.environ.get(ONE)
    return [int(asked)] if asked else list(range(count * int(os.environ.get(TIMES, "1"))))


def over_engine(seed: int) -> Schedule:
    return Schedule.of(seed, most=20)


@contextlib.contextmanager
def repeatable(seed: int, file: str) -> Iterator[None]:
    """What fails inside says how to run that schedule again."""
    try:
        yield
    except Exception as error:
        path = Path(file).relative_to(Path(__file__).parents[2])
        error.add_note(f"to repeat it: {ONE}={seed} .venv/bin/python -m pytest {path} -n0")
        raise
