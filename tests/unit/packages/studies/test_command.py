import json

import pytest
from typer.testing import CliRunner
from vllm_specrollout.bench.studies.command import STUDIES, read_inputs

from vllm_specrollout.cli.commands import app
from vllm_specrollout.errors import ConfigError


def run(*arguments: object) -> str:
    words = ["bench", "study", *map(str, arguments)]
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_list_names_every_study():
    assert [line.split()[0] for line in run("--list").splitlines()] == list(STUDIES)


def test_a_study_prints_its_inputs_and_every_row():
    text = run("tlt-table-4")
    assert "knee_rows 256; request 0.11506;" in text and "48 / 48" in text and "10 of 24" in text


def test_json_holds_inputs_tables_and_figures(tmp_path):
    out = tmp_path / "study.json"
    run("tlt-table-4", "--out", out, "--seed", 3)
    body = json.loads(out.read_text())
    assert body["study"] == "tlt-table-4" and body["seed"] == 3 and body["inputs"]["depth"] == 10
    assert len(body["tables"][0]["rows"]) == 6 and body["figures"]["worst error"] < 0.1


def test_a_file_names_only_the_inputs_that_differ(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("knee_rows = 128\naccept_length = [6.0, 7, 7.5, 7.8]\n")
    given = read_inputs("tlt-table-4", path)
    assert (given.knee_rows, given.accept_length[0], given.depth) == (128.0, 6.0, 10.0)
    assert "knee_rows 128;" in run("tlt-table-4", "--inputs", path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("knee_rows = ", "Invalid"),
        ("knee = 3", "unknown field `knee`"),
        ("knee_rows = 'x'", "got `str` - at `\\$.knee_rows`"),
        ("knee_rows = nan", ">= 0.0 - at `\\$.knee_rows`"),
        ("depth = inf", "at `\\$.depth`"),
        ("accept_length = [1.0]", "length 4"),
        ("request = 0\nrow = 2", "below 0"),
        ("depth_of_table_1 = 0", "cannot be simulated"),
    ],
)
def test_inputs_that_no_study_can_use_are_one_error_with_a_hint(tmp_path, body, message):
    path = tmp_path / "bad.toml"
    path.write_text(body)
    with pytest.raises(ConfigError, match=message) as caught:
        run("tlt-table-4", "--inputs", path)
    assert "\n\nhint: " in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no STUDY was named"),
        (["tlt"], "`STUDY` names 'tlt', which does not exist"),
        (["tlt-table-4", "--seed", "-1"], "`--seed` is -1"),
        (["tlt-table-4", "--out", "/nowhere/x.json"], "`--out` is `/nowhere/x.json`"),
        (["tlt-table-4", "--inputs", "/nowhere/x.toml"], "`/nowhere/x.toml` is no TOML file"),
    ],
)
def test_a_mistake_is_one_error_with_a_hint(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        run(*arguments)
    assert "\n\nhint: " in str(caught.value)
