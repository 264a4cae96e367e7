import msgspec
import numpy as np
import pytest
from vllm_specrollout.bench.studies.formulas import drain_ms
from vllm_specrollout.bench.studies.tlt import FITTED, PRINTED, Table4Inputs, run_table_4, speed_up, speed_ups

INPUTS = Table4Inputs()
FREE = ("request", "row", "row_beyond_knee", "draft_request")


def changed(**values):
    return msgspec.structs.replace(INPUTS, **values)


def test_each_of_the_24_cells_is_within_a_tenth_of_the_paper():
    assert speed_ups(INPUTS).shape == (6, 4)
    assert np.abs(speed_ups(INPUTS) / PRINTED - 1.0).max() < 0.10


def test_the_best_column_of_each_row_is_the_papers():
    assert speed_ups(INPUTS).argmax(axis=1).tolist() == np.asarray(PRINTED).argmax(axis=1).tolist()


def test_the_shipped_values_are_those_that_the_named_cells_yield():
    # one more step of Gauss and Newton from the shipped values moves none of them by more than their rounding
    start = np.asarray([*(getattr(INPUTS, name) for name in FREE), *INPUTS.accept_length])

    def residual(values):
        given = dict(zip(FREE, values[:4], strict=True))
        return np.log(speed_ups(changed(**given, accept_length=tuple(values[4:]))) / PRINTED)[FITTED]

    now = residual(start)
    slopes = np.stack([(residual(start * (1 + 1e-6 * one)) - now) / 1e-6 for one in np.eye(len(start))], axis=1)
    step = np.linalg.lstsq(slopes, -now, rcond=None)[0]
    assert np.abs(step).max() < 0.01


def test_more_than_half_of_the_cells_are_predicted():
    report = run_table_4(INPUTS, 0)
    assert sum(str(cell).endswith("*") for row in report.tables[0].rows for cell in row) == 10
    assert report.figures["worst error of predicted cells"] == report.figures["worst error"]


def test_verifying_nothing_with_no_drafting_is_plain_decoding():
    plain = changed(depth=0.0, draft_request=0.0)
    assert [speed_up(plain, batch, 1.0, 0) for batch in (1, 7, 32)] == pytest.approx([1.0] * 3)


def test_a_batch_drains_as_its_answers_end():
    assert drain_ms(np.asarray([3, 1, 3]), lambda batch: 10.0 * batch) == 30.0 + 2 * 20.0
