"""The command of the GPU measurements: its flags, its refusals and its exit statuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.gpu import command, machine, parts
from bench.gpu.record import FILE
from vllm_specrollout.errors import SpecRolloutError

ROOT = Path(__file__).resolve().parents[4]


def run(*arguments):
    app = typer.Typer()
    app.command()(command.run)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folders(tmp_path):
    return "--out", tmp_path / "out", "--work", tmp_path / "work"


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--steps", "checks,lunch"], "`--steps` is 'lunch', which does not exist"),
        (["--models", "70B"], "`--models` is '70B', which does not exist"),
        (["--budget", "all"], "`--budget` is 'all', which does not exist"),
        (["--taus", "5"], "`--taus` is '5', which does not exist"),
        (["--arms", "bush"], "`--arms` is 'bush', which does not exist"),
        (["--rivals", "eagle"], "`--rivals` is 'eagle', which does not exist"),
        (["--cells", "8"], "`--cells` holds '8'"),
        (["--steps", "memory"], "`--steps memory` has nothing to measure in a dry walk"),
    ],
)
def test_bad_flags_are_one_clear_error_and_leave_nothing_behind(folders, arguments, cause):
    error = run(*folders, "--dry", *arguments).exception
    assert isinstance(error, SpecRolloutError)
    assert error.cause == cause
    assert not folders[1].exists()


def test_without_a_gpu_nothing_but_the_dry_walk_starts(folders, monkeypatch):
    monkeypatch.setattr(machine, "describe", lambda: {"gpu": None})
    error = run(*folders).exception
    assert isinstance(error, SpecRolloutError)
    assert error.cause == "no NVIDIA GPU can be seen: nvidia-smi names none"


def test_two_starts_do_not_work_in_one_folder_at_once(folders):
    folders[3].mkdir()
    with command._alone(folders[3]):
        error = run(*folders, "--dry", "--steps", "checks").exception
    assert isinstance(error, SpecRolloutError) and "another start works in" in error.cause


class Fake:
    """In place of the children: every row ends as told."""

    def __init__(self, ends):
        self._ends = ends

    def __call__(self, record, **_):
        self._record = record
        return self

    def run(self, made):
        for number, (part, task) in enumerate((one, task) for one in made for task in one.tasks):
            end = self._ends.get(number, {})
            if end is None:
                return
            row = self._record.row(part, task)
            self._record.begin(row)
            if isinstance(end, str):
                self._record.fail(row, end, "", 1.0)
            else:
                self._record.end(row, {"is_right": True, **end}, 1.0)


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ({}, 0),
        ({1: {"is_right": False, "checked": "the specification"}}, command.WRONG),
        ({1: "ValueError: no"}, command.UNFINISHED),
        ({1: None}, command.UNFINISHED),
    ],
    ids=["all right", "one wrong", "one failed for the first time", "cut"],
)
def test_the_exit_status_says_whether_all_is_right_and_whether_rows_are_left(folders, monkeypatch, ends, status):
    monkeypatch.setattr(command, "Walk", Fake(ends))
    result = run(*folders, "--dry", "--steps", "checks")
    assert result.exit_code == status, result.output
    body = json.loads((folders[1] / FILE).read_text())
    assert body["is_dry"] and body["versions"]["source"] and body["host"]["gpu"] is None
    assert "results:" in (folders[1] / command.LOG).read_text()


def test_the_tables_are_printed_whatever_ends_the_walk(folders, monkeypatch):
    class Broken(Fake):
        def run(self, made):
            super().run(made)
            raise RuntimeError("broken")

    monkeypatch.setattr(command, "Walk", Broken({}))
    result = run(*folders, "--dry", "--steps", "checks")
    assert isinstance(result.exception, RuntimeError)
    assert "Steps (dry)" in result.output and (folders[1] / FILE).exists()


def test_the_parent_needs_neither_torch_nor_vllm():
    code = "import sys, bench.gpu.command; print({'torch', 'vllm', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_every_step_is_described():
    assert set(parts.FIRST_HOUR) | {"memory"} == set(parts.STEPS)
