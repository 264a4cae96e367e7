"""Whatever a row does, it costs that row: the others are measured, and nothing is left behind."""

import os
import time
from pathlib import Path

import pytest

from bench.gpu.record import Part, Record, Task
from bench.gpu.walk import Walk

ROOT = Path(__file__).resolve().parents[4]


def part(*kinds, step="step", limit_s=20.0, setup=None, expected_s=0.0, **params):
    tasks = tuple(
        Task(name=f"{i} {kind}", params={"kind": kind, "i": i, **params}, limit_s=limit_s, expected_s=expected_s)
        for i, kind in enumerate(kinds)
    )
    return Part(
        step=step,
        name=step,
        runner="tests.unit.bench.gpu.fake_rows:Rows",
        setup=setup or {},
        tasks=tasks,
        limit_s=30.0,
        expected_s=0.0,
    )


class Start:
    """One start of the walk, in the same folder as those before."""

    def __init__(self, folder, code="code"):
        self.record = Record([folder], [], {"source": code}, {})
        self.said, self.children = [], 0
        self._folder = folder

    def run(self, *parts, until=float("inf")):
        def ended():
            self.children += 1

        walk = Walk(
            self.record,
            until=until,
            environment={**os.environ, "PYTHONPATH": str(ROOT)},
            log=self._folder / "log",
            say=self.said.append,
            after_child=ended,
            after_part=lambda: None,
        )
        walk.run(parts)
        return [row for one in parts for task in one.tasks for row in [self.record.row(one, task)]]


@pytest.fixture
def start(tmp_path):
    return lambda **options: Start(tmp_path, **options)


def states(rows):
    return [row.state for row in rows]


def test_rows_of_a_part_share_a_process_that_knows_what_it_will_be_asked_for(start):
    one = start()
    rows = one.run(part("fine", "fine"))
    assert states(rows) == ["done", "done"] and one.children == 1
    assert rows[0].values["pid"] == rows[1].values["pid"] != os.getpid()
    assert rows[0].values["expected"] == ["fine", "fine"]
    assert rows[0].is_right and "is_right" not in rows[0].values


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("raises", "ValueError: a row that cannot be"),
        ("segfaults", "its process died of SIGSEGV"),
        ("leaves", "its process ended with 7"),
        ("speaks_python", "not JSON serializable"),
    ],
)
def test_a_row_that_ends_its_process_costs_itself_only(start, kind, cause):
    one = start()
    before, bad, after = one.run(part("fine", kind, "fine"))
    assert states([before, bad, after]) == ["done", "failed", "done"]
    assert cause in bad.error
    assert one.children == 2 and before.values["pid"] != after.values["pid"]


def test_an_exception_is_kept_with_its_traceback_and_a_crash_with_its_stack(start):
    raised, crashed, _ = start().run(part("raises", "fine"), part("segfaults", step="other"))[:2] + [None]
    assert 'raise ValueError("a row that cannot be")' in raised.trace
    (crashed,) = start().run(part("segfaults", step="other"))
    assert "Segmentation fault" in crashed.trace and "segfaults" in crashed.trace


def test_a_row_that_hangs_is_ended_in_time_and_its_stack_is_kept(start):
    one = start()
    hung, after = one.run(part("hangs", "fine", limit_s=1.0))
    assert states([hung, after]) == ["failed", "done"]
    assert "no answer within 1 s" in hung.error and "hangs" in hung.trace


def test_a_row_that_is_refused_leaves_its_process_to_the_others(start):
    one = start()
    refused, after = one.run(part("refuses", "fine"))
    assert states([refused, after]) == ["failed", "done"] and one.children == 1


def test_a_part_is_given_up_when_one_process_after_the_other_is_lost(start):
    one = start()
    rows = one.run(part("raises", "segfaults", "fine"), part("fine", step="other"))
    assert states(rows) == ["failed", "failed", "begun", "done"]
    assert rows[2].attempts == 0
    assert one.record.notes == ["step: given up after 2 failures in a row"]


def test_a_setup_that_fails_is_told_and_tried_for_two_rows(start):
    rows = start().run(part("fine", "fine", "fine", setup={"fails": True}))
    assert states(rows) == ["failed", "failed", "begun"]
    assert rows[0].error == "while it started: RuntimeError: no setup today" and "RuntimeError" in rows[0].trace


def test_what_is_done_is_not_measured_again_and_what_failed_is_tried_once_more(start):
    first = start()
    done, failed = first.run(part("fine", "raises"))
    again = start()
    assert again.run(part("fine", "raises"))[0].values == done.values
    assert (
        again.children == 1 and again.record.row(part("fine", "raises"), part("fine", "raises").tasks[1]).attempts == 2
    )
    third = start()
    third.run(part("fine", "raises"))
    assert third.children == 0


def test_what_other_code_has_measured_is_measured_again_and_kept_beside(start):
    start().run(part("fine"))
    other = start(code="new code")
    other.run(part("fine"))
    assert other.children == 1
    assert len(start().record._rows) == 2


def test_without_time_for_a_row_nothing_is_begun(start):
    one = start()
    rows = one.run(part("fine", expected_s=60.0), part("fine", step="other"), until=time.monotonic() + 30)
    assert states(rows) == ["begun", "done"] and rows[0].attempts == 0
    assert one.said[0] == "step: no time left for it"


@pytest.mark.nightly
def test_the_deadline_cuts_a_row_off_which_is_then_begun_but_not_failed(start):
    one = start()
    hung, after = one.run(part("hangs", "fine", limit_s=60.0), until=time.monotonic() + 5)
    assert (hung.state, hung.attempts, after.attempts) == ("begun", 1, 0)
    assert start().run(part("hangs", "fine", limit_s=1.0))[1].state == "done"


def test_processes_that_a_row_started_end_with_the_part(start):
    (row,) = start().run(part("starts_others"))
    end = time.monotonic() + 5
    while Path(f"/proc/{row.values['pid']}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{row.values['pid']}").exists()
