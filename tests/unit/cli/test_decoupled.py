"""`specrollout plan`: a table, a file, a configuration, and one clear error for what makes no sense."""

import json

import pytest
from typer.testing import CliRunner

from tests.unit.cluster.test_profiles import WRITTEN, other, profile
from vllm_specrollout.cli.commands import app
from vllm_specrollout.cluster.profiles import OwnDrafts, save
from vllm_specrollout.cluster.rates import AffineTime
from vllm_specrollout.config import parse
from vllm_specrollout.errors import SpecRolloutError

SIZES = ["--gpus", "2", "--batch", "2", "--max-window", "2", "--one-host"]


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def written(tmp_path, *arguments):
    result = run(*SIZES, "--out", tmp_path / "plan.json", *arguments)
    assert result.exit_code == 0, result.exception
    return json.loads((tmp_path / "plan.json").read_text()), result.stdout


@pytest.fixture
def mine(tmp_path):
    """A file that somebody wrote."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(WRITTEN))
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_plans_are_printed_and_written_the_best_first(tmp_path, mine):
    report, text = written(tmp_path, "--profile", mine)
    assert "are estimates" in text
    plans = [report["best"], *report["others"]]
    assert {p["mode"] for p in plans} == {"plain", "coupled", "decoupled"} and report["estimate"] is True
    speeds = [p["tokens_per_s"] for p in plans]
    assert speeds == sorted(speeds, reverse=True)
    assert all(f"{p['tokens_per_s']:.1f}" in text for p in plans)


def test_of_a_model_all_drafters_are_planned_that_its_engines_have_measured(tmp_path):
    save(profile(draft=AffineTime(0.0, 0.5), match=0.95, positions=400))
    save(profile(drafter="slow", draft=AffineTime(0.0, 50.0)))
    report, text = written(tmp_path, "--model", "big")
    assert report["best"]["drafter"] == "small" and {p["drafter"] for p in report["others"]} == {"small", "slow"}
    assert "slow" in text
    report, _ = written(tmp_path, "--model", "big", "--drafter", "slow")
    assert {p["drafter"] for p in report["others"]} == {"slow"}


MODEL = {"speculative_config": {"method": "draft_model", "model": "small", "num_speculative_tokens": 2}}
ELSEWHERE = {"devices": ["cuda:1"], "decoupled": {"window": 2}}


@pytest.mark.parametrize(
    ("draft_ms", "expected"),
    [
        (500.0, {"placement": "coupled"}),
        (0.1, {"placement": "coupled", **MODEL}),
        (6.0, {"placement": "decoupled", **MODEL, **ELSEWHERE}),
    ],
)
def test_the_best_plan_becomes_a_configuration_that_engines_take(tmp_path, draft_ms, expected):
    save(profile(device="cuda: a card", draft=AffineTime(0.0, draft_ms), match=0.95, positions=400))
    _, text = written(tmp_path, "--model", "big", "--apply", tmp_path / "applied.json")
    applied = json.loads((tmp_path / "applied.json").read_text())
    assert applied == expected and parse(applied) is not None
    command = f"vllm serve big --spec-rollout {tmp_path / 'applied.json'}"
    # two engines of one device each, or one of two
    is_one = expected["placement"] == "decoupled"
    assert text.splitlines()[-1] == (command if is_one else f"CUDA_VISIBLE_DEVICES=1 {command} --port 8001")


def test_several_devices_that_draft_are_drafters_alike(tmp_path):
    two = {2: AffineTime(0.5, 20.0, 0.3)}
    save(profile(key=other(tensor_parallel=2), verify=two, draft=AffineTime(4.0, 2.0), match=0.95, positions=400))
    result = run("--gpus", 4, "--batch", 8, "--one-host", "--model", "big", "--apply", tmp_path / "applied.json")
    applied = json.loads((tmp_path / "applied.json").read_text())
    assert applied["devices"] == ["cpu:2"]
    assert applied["decoupled"]["drafters"] == [{"model": "small", "devices": ["cpu:3"]}]
    assert "--tensor-parallel-size 2" in result.stdout


def test_a_plan_of_several_groups_says_how_often_its_file_is_wanted_and_what_starts_each(tmp_path):
    verify = {1: AffineTime(2.0, 13.0, 0.05)}
    save(profile(device="cuda: a card", draft=AffineTime(0.0, 6.0), match=0.95, verify=verify))
    result = run("--gpus", 8, "--batch", 8, "--one-host", "--model", "big", "--apply", tmp_path / "applied.json")
    said, first, *_, fourth = result.stdout.splitlines()[-5:]
    assert said == "The file is wanted 4 times: for 4 engines, on 2 devices of its own each."
    command = f"vllm serve big --spec-rollout {tmp_path / 'applied.json'} --port"
    assert first == f"CUDA_VISIBLE_DEVICES=0,1 {command} 8000" and fourth == f"CUDA_VISIBLE_DEVICES=6,7 {command} 8003"


def test_a_plain_plan_switches_off_what_the_engine_has_where_that_is_known(tmp_path):
    save(profile(draft=AffineTime(0.0, 500.0), own=OwnDrafts(1.01, 16.0)))
    written(tmp_path, "--model", "big", "--apply", tmp_path / "applied.json")
    assert json.loads((tmp_path / "applied.json").read_text()) == {"placement": "coupled", "budget": "off"}


def test_only_so_many_runners_up_are_printed(mine):
    lengths = [len(run(*SIZES, "--profile", mine, "--show", n).stdout.splitlines()) for n in (0, 1)]
    assert lengths[1] == lengths[0] + 1


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--gpus", "0"], "`--gpus` is 0, outside 1 to 65536"),
        (["--batch", "0"], "`--batch` is 0, outside 1 to 16777216"),
        (["--max-window", "65"], "`--max-window` is 65, outside 1 to 64"),
        ([], "`--model` and `--profile` are not given"),
        (["--model", "big", "--profile", "x.json"], "`--model` and `--profile` are both given"),
        (["--profile", "nowhere.json"], "`--profile` is `nowhere.json`, which cannot be read"),
        (["--model", "other"], "nothing is known of drafters beside `other`"),
        (["--model", "big", "--drafter", "other"], "nothing is known of `other` beside `big`"),
        (["--apply", "/nowhere/x.json", "--model", "big"], "`--apply`"),
    ],
)
def test_bad_flags_are_one_clear_error(arguments, cause):
    save(profile())
    error = run(*SIZES, *arguments).exception
    assert isinstance(error, SpecRolloutError)
    assert error.cause.startswith(cause) and error.hint
