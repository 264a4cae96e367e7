"""`specrollout plan graphs`: a table, a file, and one clear error for what makes no sense."""

import json

import pytest
from typer.testing import CliRunner

from vllm_specrollout.cli.commands import app
from vllm_specrollout.errors import SpecRolloutError


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", "graphs", *map(str, arguments)])


@pytest.fixture
def model(tmp_path):
    def write(**changes):
        sizes = {"num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944}
        config = {**sizes, "num_attention_heads": 28, "num_key_value_heads": 4, "dtype": "bfloat16", **changes}
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return tmp_path

    return write


def test_the_table_says_that_its_figures_are_estimates():
    result = plan()
    assert result.exit_code == 0
    assert "MiB (estimate)" in result.stdout
    assert "not measured" in result.stdout


def test_a_models_folder_gives_the_same_plan_as_its_named_shape(model, tmp_path):
    for name, arguments in (("a", ["--shape", "7B"]), ("b", ["--model", model()])):
        assert plan(*arguments, "--out", tmp_path / name).exit_code == 0
    assert json.loads((tmp_path / "a").read_text()) == json.loads((tmp_path / "b").read_text())


def test_limits_hold_in_graphs_and_in_mib(tmp_path):
    for limit, field, most in (("20", "target_graphs", 20), ("0.25GiB", "estimated_mib", 256)):
        assert plan("--limit", limit, "--out", tmp_path / "plan.json").exit_code == 0
        report = json.loads((tmp_path / "plan.json").read_text())
        assert report["estimate"] is True
        assert report["schemes"]["shared (the plan)"][field] <= most


def test_a_drafting_model_has_graphs_of_its_own(tmp_path):
    assert plan("--drafter", "0.5B", "--out", tmp_path / "plan.json").exit_code == 0
    schemes = json.loads((tmp_path / "plan.json").read_text())["schemes"]
    assert 0 < schemes["shared (the plan)"]["drafter_graphs"] < schemes["naive, every pair"]["drafter_graphs"]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--draft", "65"], "`--draft` holds 65, outside 1 to 64"),
        (["--max-num-seqs", "0"], "`--max-num-seqs` is 0, outside 1 to 65536"),
        (["--shape", "70B"], "`--shape` is '70B', which does not exist"),
        (["--model", "x", "--shape", "7B"], "`--model` and `--shape` are both given"),
        (["--model", "x"], "`--model` is `x`, which holds no config.json that can be read"),
        (["--drafter", "x"], "`--drafter` is `x`, which holds no config.json that can be read"),
        (["--limit", "1.5"], "`--limit` is '1.5', neither a number of graphs nor a size"),
        (["--max-tokens", "8"], "at most 8 tokens a step, where the smallest draft needs 9"),
    ],
)
def test_bad_flags_are_one_clear_error(arguments, cause):
    error = plan(*arguments).exception
    assert isinstance(error, SpecRolloutError)
    assert error.cause == cause


def test_a_limit_that_no_graph_fits_is_refused():
    error = plan("--limit", "1MiB").exception
    assert isinstance(error, SpecRolloutError)
    assert error.cause.endswith("the limit is 1 MiB")


def test_a_config_without_sizes_is_refused(model):
    error = plan("--model", model(hidden_size=None)).exception
    assert isinstance(error, SpecRolloutError)
    assert "does not give the model's shape: KeyError('hidden_size')" in error.cause
