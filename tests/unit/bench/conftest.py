"""Runs made by hand, and those of fake engines."""

import json

import pytest

from bench.runner import engines
from bench.runner.rows import Run, WorkerTotals
from tests.unit.bench.runner.fake_engines import FakeProcess, invoke
from vllm_specrollout.errors import SpecRolloutError


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


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Run a benchmark's command with fake engines: (exit status, the report, what was printed)."""

    def run(function, *arguments, kind=FakeProcess, **behaviour):
        monkeypatch.setattr(engines, "EngineProcess", type("Fake", (kind,), behaviour))
        report = tmp_path / "report.json"
        result = invoke(function, "--out", report, *arguments)
        if isinstance(result.exception, SpecRolloutError):
            raise result.exception
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, json.loads(report.read_text()), result.stdout

    return run
