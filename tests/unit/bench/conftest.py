"""Runs made by hand."""

import pytest

from bench.runner.rows import Run, WorkerTotals


@pytest.fixture
def make_run():
    """Make a run of a constant step time; with drafts if `totals` are given."""

    def make(token_ids, step_s, finish_s=None, **totals):
        zeros = dict.fromkeys(WorkerTotals.__dataclass_fields__, 0)
        return Run(
            token_ids=tuple(map(tuple, token_ids)),
            finish_s=tuple(finish_s or [step_s[-1]] * len(token_ids)),
            step_s=tuple(step_s),
            totals=WorkerTotals(**{**zeros, **totals}) if totals else None,
        )

    return make
