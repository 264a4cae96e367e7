"""docs/benchmarks.md is what bench/results says, and bench/results is small enough to be read."""

import importlib.util
import json
from pathlib import Path

import pytest

from bench.runner.fields import FIELDS, Row, speedup
from bench.runner.results import TABLES

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "bench" / "results").glob("*"))


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_benchmarks", ROOT / "docs" / "benchmarks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_results_would_write(generator):
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "run `make docs`"


def test_every_kept_command_and_commit_stands_on_the_page(generator):
    text = generator.page()
    for path in FILES:
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            assert run["command"] in text and run["commit"][:10] in text
            assert {"cpu", "cores", "memory_gib"} <= set(run["host"])


def test_there_is_at_most_one_short_file_per_scenario():
    assert {path.name for path in FILES} <= {f"{name}.json" for name in TABLES}
    assert [path.name for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > 200] == []


def test_a_row_whose_outputs_differ_shows_no_speed():
    assert speedup({"identical": False, "speedup": None}) == "outputs differ"
    assert speedup({"speedup": 2.0, "speedup_quartiles": [1.5, 2.5], "rounds": 3}) == "2.00x (1.50 to 2.50)"
    assert speedup({"speedup": 2.0, "speedup_quartiles": [2.0, 2.0], "rounds": 1}) == "2.00x"


def test_gpu_rows_have_a_table_of_their_own():
    times = {"ours": {"median_us": 3.0, "low_us": 2.0, "high_us": 4.0}}
    rows = [{"step": "kernels", "name": "verify", "passed": True, "times": times}]
    rows += [{"step": "micro", "name": "verify", "unit": "us", "measured": 2.0, "predicted": 1.0}]
    text = TABLES["kernels"]({"rows": rows})
    assert text.splitlines()[0] == "| step | name | right | ours, us | unit | measured | predicted |"
    assert "| kernels | verify | yes | 3.0 (2.0 to 4.0) | - | - | - |" in text
    assert "| micro | verify | - | - | us | 2.00 | 1.00 |" in text
    bare = [{"step": "kernels", "name": name, "passed": name == "right"} for name in ("right", "broken")]
    assert TABLES["kernels"]({"rows": bare}) == "2 checks; wrong: broken."


def test_no_kept_row_tells_a_speed_of_outputs_that_differ():
    rows = [row for path in FILES for run in json.loads(path.read_text())["runs"] for row in run["rows"]]
    assert all("speedup" not in row for row in rows if row.get("identical") is False)
    assert any(row.get("identical") for row in rows)


def test_a_row_tells_nothing_but_declared_fields():
    row = Row(name="chain", speedup=2.0)
    assert (row.name, row.speedup, row.ideal, row.but(speedup=None).speedup) == ("chain", 2.0, None, None)
    with pytest.raises(KeyError, match="speed_up"):
        row.but(speed_up=3.0)
    with pytest.raises(AttributeError):
        _ = row.speed_up


def test_what_is_kept_has_no_name_that_is_only_shown():
    assert not [name for name, field in FIELDS.items() if field.is_kept and name.endswith(("_told", "_us"))]
