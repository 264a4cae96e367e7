"""Rows on disk: what is found again, what is begun again, and what a cut leaves."""

import json

import pytest

from bench.gpu import record as record_module
from bench.gpu.record import FILE, Part, Record, Task, key_of

IDENTITY = {"source": "abc", "torch": "2.11.0", "gpu": "H200"}


def part(*numbers, step="step"):
    tasks = tuple(Task(name=str(n), params={"n": n}, limit_s=1.0, expected_s=1.0) for n in numbers)
    return Part(step=step, name=step, runner="", tasks=tasks, limit_s=1.0, expected_s=1.0)


def opened(*folders, earlier=(), identity=IDENTITY, head=None):
    return Record(folders, list(earlier), identity, head or {})


def row_of(record, n=1):
    return record.row(part(n), part(n).tasks[0])


def test_a_rows_key_changes_with_whatever_its_figures_depend_on():
    key = key_of("step", {"batch": 1, "tau": 4.0}, IDENTITY)
    assert key == key_of("step", {"tau": 4.0, "batch": 1}, dict(reversed(IDENTITY.items())))
    assert key != key_of("step", {"batch": 2, "tau": 4.0}, IDENTITY)
    assert key != key_of("other", {"batch": 1, "tau": 4.0}, IDENTITY)
    for name in IDENTITY:
        assert key != key_of("step", {"batch": 1, "tau": 4.0}, {**IDENTITY, name: "another"})


def test_a_row_that_was_done_is_found_again_with_all_its_values(tmp_path):
    record = opened(tmp_path, head={"versions": {"commit": "c0ffee"}})
    record.begin(row_of(record))
    record.end(row_of(record), {"is_right": True, "us": 1.5, "checked": "against itself"}, 0.25)
    row = row_of(opened(tmp_path))
    assert (row.state, row.is_right, row.values, row.seconds) == (
        "done",
        True,
        {"us": 1.5, "checked": "against itself"},
        0.25,
    )
    assert row.commit == "c0ffee" and row.began.endswith("Z") and not row.may_begin


def test_a_row_under_way_when_everything_ended_is_begun_once_more_and_then_left(tmp_path):
    for attempt in (1, 2):
        record = opened(tmp_path)
        assert row_of(record).may_begin
        record.begin(row_of(record))
        assert row_of(record).attempts == attempt
    assert not row_of(opened(tmp_path)).may_begin


def test_a_failure_is_kept_with_its_reason_until_the_row_succeeds(tmp_path):
    record = opened(tmp_path)
    record.begin(row_of(record))
    record.fail(row_of(record), "ValueError: no", "Traceback ...", 1.0)
    again = opened(tmp_path)
    assert (row_of(again).state, row_of(again).error, row_of(again).trace) == (
        "failed",
        "ValueError: no",
        "Traceback ...",
    )
    again.begin(row_of(again))
    again.end(row_of(again), {}, 1.0)
    assert (row_of(opened(tmp_path)).state, row_of(opened(tmp_path)).error) == ("done", "")


def test_rows_are_gathered_from_every_folder_and_the_best_of_each_is_kept(tmp_path):
    folders = [tmp_path / name for name in ("out", "work", "earlier")]
    for folder in folders:
        folder.mkdir()
    earlier = opened(folders[2])
    earlier.begin(row_of(earlier, 1))
    earlier.end(row_of(earlier, 1), {"from": "earlier"}, 1.0)
    here = opened(folders[1])
    here.begin(row_of(here, 1))
    here.begin(row_of(here, 2))
    both = opened(*folders[:2], earlier=folders[2:])
    assert row_of(both, 1).values == {"from": "earlier"}
    assert row_of(both, 2).attempts == 1
    both.write()
    assert (folders[0] / FILE).read_text() == (folders[1] / FILE).read_text()


def test_a_write_that_is_cut_leaves_the_file_before_it(tmp_path, monkeypatch):
    record = opened(tmp_path)
    record.begin(row_of(record))
    before = (tmp_path / FILE).read_text()

    def cut(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(record_module.os, "replace", cut)
    with pytest.raises(KeyboardInterrupt):
        record.end(row_of(record), {}, 1.0)
    assert (tmp_path / FILE).read_text() == before
    assert row_of(opened(tmp_path)).state == "begun"


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2, "rows": [{"no": "row"}]}'])
def test_a_file_that_cannot_be_read_is_told_and_measured_anew(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    record = opened(tmp_path)
    assert "could not be read" in record.notes[0]
    assert row_of(record).may_begin


def test_rows_of_another_schema_are_not_taken_for_ours(tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"schema": 1, "rows": [{"anything": 1}]}))
    assert opened(tmp_path).rows([part(1)]) == []


def test_rows_come_in_the_order_of_their_parts_and_only_those_that_were_begun(tmp_path):
    record = opened(tmp_path)
    for n in (3, 1):
        record.begin(row_of(record, n))
    row_of(record, 2)
    assert [row.name for row in record.rows([part(1, 2, 3)])] == ["1", "3"]
