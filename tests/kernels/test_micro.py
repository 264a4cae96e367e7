"""The parts of a step without an engine, walked through on a CPU; and what was predicted of a device."""

import json

import pytest

from bench.gpu import micro
from bench.gpu.commands import MICRO
from bench.kernels.timing import CallTime


class Watch:
    """In place of the timer: every call is made once, and takes as long as the test says."""

    device = "cpu"

    def time(self, calls):
        for call in calls:
            call()
        return CallTime.of([1.0, 2.0, 3.0])


@pytest.fixture
def measured(device):
    """Rows of a part."""
    return lambda part: list(micro._MAKERS[part](Watch()))


def test_the_hour_knows_every_part():
    assert tuple(MICRO) == micro.PARTS


def test_every_way_of_attention_has_a_prediction_where_one_was_dared(measured):
    names = [row.name.partition(": ")[2] for row in measured("attention")]
    assert names == ["causal", "over the context", "context and nodes"]
    assert {len(ways) for ways in micro._ATTENTION.values()} == {3}
    # nodes come on top of the context
    assert all(ways[2] > ways[1] for ways in micro._ATTENTION.values() if ways[0])


@pytest.mark.parametrize("part", ["verify", "lookup"])
def test_what_is_timed_at_once_tells_its_quartiles(measured, part):
    (row,) = measured(part)
    assert (row.measured, row.unit, row.quartiles) == (2.0, "us", (1.0, 3.0))


def test_rows_that_attend_alike_never_differ(measured):
    rows = measured("rows")
    assert {row.measured for row in rows} == {0.0} and len(rows) == 12
    assert json.dumps([row.predicted for row in rows])


def test_products_rise_in_tiles_of_64_rows_once_computing_takes_longer_than_reading():
    sizes, head = [(4608, 3584), (3584, 3584)], (152064, 3584)
    found = {rows: micro.predicted_products_ms(rows, sizes, 28, head) for rows in (1, 64, 256, 257, 320)}
    assert found[1] == found[64] < found[256] < found[257] == found[320]
