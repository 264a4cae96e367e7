from dataclasses import replace

import numpy as np
import pytest

from vllm_specrollout.cluster.simulate.inputs import load
from vllm_specrollout.cluster.simulate.registry import run_study
from vllm_specrollout.cluster.simulate.studies.tlt_table_4 import is_fitted, speed_up

INPUTS = load("tlt-table-4")
FREE = ("request", "row", "row_beyond_knee", "draft_request", "accept_length")


def ours(inputs=INPUTS):
    return np.asarray([[speed_up(inputs, int(b), c) for c in range(4)] for b in inputs.numbers("batch_sizes")])


def with_values(values):
    """The inputs with other values of those that were fitted."""
    given = dict(INPUTS.inputs)
    for name, value in zip(FREE, [*values[:4], tuple(values[4:])], strict=True):
        given[name] = replace(given[name], value=value)
    return replace(INPUTS, inputs=given)


def test_each_of_the_24_cells_is_within_a_tenth_of_the_paper():
    printed = np.asarray(INPUTS.target_table("speed_up"))
    assert printed.shape == (6, 4)
    assert np.abs(ours() / printed - 1.0).max() < 0.10


def test_the_best_column_of_each_row_is_the_papers():
    assert ours().argmax(axis=1).tolist() == np.asarray(INPUTS.target_table("speed_up")).argmax(axis=1).tolist()


def test_the_shipped_values_are_those_that_the_named_cells_yield():
    # one more step of Gauss and Newton from the shipped values moves none of them by more than their rounding
    printed = np.asarray(INPUTS.target_table("speed_up"))
    tokens, batches = INPUTS.numbers("tokens_to_verify"), INPUTS.numbers("batch_sizes")
    used = np.asarray([[is_fitted(INPUTS, int(b), n) for n in tokens] for b in batches])
    start = np.asarray([*(INPUTS.number(name) for name in FREE[:4]), *INPUTS.numbers("accept_length")])

    def residual(values):
        return np.log(ours(with_values(values)) / printed)[used]

    now = residual(start)
    slopes = np.stack([(residual(start * (1 + 1e-6 * one)) - now) / 1e-6 for one in np.eye(len(start))], axis=1)
    step = np.linalg.lstsq(slopes, -now, rcond=None)[0]
    assert np.abs(step).max() < 0.01


def test_more_than_half_of_the_cells_are_predicted():
    report = run_study("tlt-table-4")
    stars = sum(str(cell).endswith("*") for row in report.tables[0].rows for cell in row)
    assert stars == 10
    assert report.figures["worst error of predicted cells"] == report.figures["worst error"]


def test_verifying_nothing_with_no_drafting_is_plain_decoding():
    given = dict(INPUTS.inputs)
    for name, value in (
        ("tokens_to_verify", (0.0,)),
        ("accept_length", (1.0,)),
        ("depth", 0.0),
        ("draft_request", 0.0),
    ):
        given[name] = replace(given[name], value=value)
    plain = replace(INPUTS, inputs=given)
    assert [speed_up(plain, batch, 0) for batch in (1, 7, 32)] == pytest.approx([1.0] * 3)
