"""Kernels one after the other: one that raises is wrong and told, and the others still run."""

import io

import pytest
from rich.console import Console

pytest.importorskip("torch")

from bench.runner.display import Display
from bench.runner.scenario import Session
from bench.scenarios.kernels import Kernels


def broken():
    raise RuntimeError("an illegal address")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """What is found with these kernels, and what is printed of it."""

    def run(*jobs, is_usable=True):
        # which measuring sets for this process
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(Kernels, "_checks", lambda self: iter(jobs))
        monkeypatch.setattr(Kernels, "_is_usable", lambda self: is_usable)
        scenario, out = Kernels(device="cpu"), io.StringIO()
        found = scenario.measure(Session(Display(), tmp_path))
        scenario.show(found, Console(file=out, width=160))
        return found, out.getvalue()

    return run


def right():
    return {"passed": True, "checked": "the specification"}


def test_a_kernel_that_raises_is_wrong_and_the_others_still_run(measured):
    found, text = measured(("one", broken), ("two", right))
    assert [row.passed for row in found.rows] == [False, True] and not found.is_passed
    assert "one: RuntimeError: an illegal address" in text


def test_on_a_device_that_is_of_no_more_use_nothing_else_is_measured(measured):
    found, text = measured(("one", broken), ("two", right), is_usable=False)
    assert [row.name for row in found.rows] == ["one"] and "what follows is left out" in text
