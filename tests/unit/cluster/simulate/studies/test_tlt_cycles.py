import pytest

from vllm_specrollout.cluster.simulate.registry import run_study

REPORT = run_study("tlt-cycles")


def test_one_cycle_time_per_drafter_explains_every_row_within_two_percent():
    assert REPORT.figures["worst cycle error"] < 0.02
    rows = REPORT.tables[0].rows
    assert len(rows) == 8
    for row in rows:
        assert float(row[4]) == pytest.approx(float(row[5]), rel=0.02)


@pytest.mark.parametrize(("row", "speed_up"), [(0, 2.24), (6, 2.29), (7, 2.55)])
def test_speed_ups_are_those_of_table_7(row, speed_up):
    assert float(str(REPORT.tables[0].rows[row][7]).rstrip("x")) == pytest.approx(speed_up, rel=0.01)


def test_one_row_of_each_drafter_is_given_and_the_others_are_predicted():
    kinds = [row[-1] for row in REPORT.tables[0].rows]
    assert kinds.count("given") == 4 and kinds.count("predicted") == 4
