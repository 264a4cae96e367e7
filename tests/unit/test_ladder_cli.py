"""`specrollout plan ladder`: a table, a file, a picture, and one clear error for what makes no sense."""

import json

import pytest
from typer.testing import CliRunner

from vllm_specrollout.cli.commands import app
from vllm_specrollout.decoupled.ladder import load_ladder
from vllm_specrollout.errors import SpecRolloutError

METHODS = {"0.5B": {"fixed_ms": 1.0, "per_request_ms": 0.004}, "ngram": {"fixed_ms": 0.02}}


@pytest.fixture
def ladder(tmp_path):
    (tmp_path / "methods.json").write_text(json.dumps(METHODS))
    given = ["--methods", tmp_path / "methods.json", "--verify-ms", "13+0.04*b+0.03*n"]
    return lambda *arguments: CliRunner().invoke(app, ["plan", "ladder", *map(str, [*given, *arguments])])


def test_the_table_has_a_column_for_each_method(ladder):
    result = ladder()
    assert result.exit_code == 0
    assert "0.5B" in result.stdout and "ngram" in result.stdout
    assert "drawn at random: at most" in result.stdout


def test_the_chosen_method_is_shown(ladder):
    assert "chosen for the batch: 0.5B" in ladder("--accept", "0.5B=0.7,ngram=0.3").stdout
    assert "chosen for the batch: none" in ladder("--accept", "0.5B=0").stdout


@pytest.mark.parametrize("mode", ["coupled", "decoupled"])
def test_the_file_is_a_ladder(ladder, tmp_path, mode):
    assert ladder("--out", tmp_path / "ladder.json", "--mode", mode, "--batch", 8).exit_code == 0
    found = load_ladder(tmp_path / "ladder.json")
    assert (found.mode, found.batch, found.methods) == (mode, 8, ("0.5B", "ngram"))


def test_the_picture_is_drawn(ladder, tmp_path):
    pytest.importorskip("matplotlib")
    assert ladder("--plot", tmp_path / "ladder.png", "--accept", "0.5B=0.7").exit_code == 0
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_no_known_format_is_refused(ladder, tmp_path):
    pytest.importorskip("matplotlib")
    error = ladder("--plot", tmp_path / "ladder.nonsense").exception
    assert isinstance(error, SpecRolloutError)
    assert error.hint == "end the name in .png, .pdf or .svg"


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--batch", "0"], "`--batch` is 0, outside 1 to 65536"),
        (["--mode", "plain"], "`--mode` is 'plain', which does not exist"),
        (["--accept", "7B=0.5"], "`--accept` is '7B', which does not exist"),
        (["--accept", "0.5B=2"], "`--accept 0.5B=` holds 2, outside 0 to 1"),
        (["--accept", "0.5B=0.1,0.5B=0.2"], "`--accept` names '0.5B' twice"),
        (["--verify-ms", "0+0"], "`--verify-ms` is '0+0', a step that takes no time"),
        (["--methods", "/nowhere.json"], "`--methods` is `/nowhere.json`, which cannot be read as JSON"),
    ],
)
def test_bad_flags_are_one_clear_error(ladder, arguments, cause):
    error = ladder(*arguments).exception
    assert isinstance(error, SpecRolloutError)
    assert error.cause.startswith(cause)
