import json

import pytest
from typer.testing import CliRunner

from vllm_specrollout.cli.commands import app
from vllm_specrollout.cluster.simulate.inputs import load
from vllm_specrollout.cluster.simulate.registry import STUDIES
from vllm_specrollout.errors import ConfigError


def run(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["simulate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_list_names_every_study():
    lines = run("--list").splitlines()
    assert [line.split()[0] for line in lines] == list(STUDIES)


def test_a_study_prints_every_input_with_its_mark_and_every_row():
    text = run("tlt-table-4")
    for given in load("tlt-table-4").inputs.values():
        line = next(line for line in text.splitlines() if line.startswith(f"{given.name} "))
        assert given.mark in line.split()
    assert "48 / 48" in text and "10 of 24" in text


def test_json_holds_inputs_tables_and_figures(tmp_path):
    out = tmp_path / "study.json"
    run("tlt-cycles", "--json", out, "--seed", 3)
    body = json.loads(out.read_text())
    assert body["study"] == "tlt-cycles" and body["seed"] == 3
    assert {given["mark"] for given in body["inputs"]} == {"derived"}
    assert len(body["tables"][0]["rows"]) == 8 and body["figures"]["worst cycle error"] < 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no STUDY was named"),
        (["tlt"], "`STUDY` names 'tlt', which does not exist"),
        (["tlt-cycles", "--seed", "-1"], "`--seed` is -1"),
        (["tlt-cycles", "--json", "/nowhere/x.json"], "`--json` is `/nowhere/x.json`"),
        (["tlt-cycles", "--inputs", "/nowhere/x.toml"], "`/nowhere/x.toml` is no TOML file"),
    ],
)
def test_a_mistake_is_one_error_with_a_hint(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        run(*arguments)
    assert "\n\nhint: " in str(caught.value)


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "study.png"
    run("tlt-table-4", "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
