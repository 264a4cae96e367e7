"""`specrollout plan decoupled`: a table, a file, and one clear error for what makes no sense."""

import json

import pytest
from typer.testing import CliRunner

from vllm_specrollout.cli import app
from vllm_specrollout.errors import SpecRolloutError

CLUSTER = ["--gpus", "256", "--batch", "8192", "--accept", "0.8"]
LINES = ["--draft-ms", "1+0.002*b", "--verify-ms", "22+0.1*b+0.06*n,13+0.04*b+0.03*n", "--verify-gpus", "2,4"]


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def plan(*arguments):
    return run("decoupled", *arguments)


def written(tmp_path, *arguments):
    result = plan(*CLUSTER, *LINES, "--json", tmp_path / "plan.json", *arguments)
    assert result.exit_code == 0, result.exception
    return json.loads((tmp_path / "plan.json").read_text())


@pytest.fixture
def profile(tmp_path):
    def write(**changes):
        body = {"draft": {"rows": [[1, 1.0], [64, 1.2]]}, "verify": {"4": {"fixed_ms": 13, "per_request_ms": 0.04}}}
        (tmp_path / "profile.json").write_text(json.dumps({**body, **changes}))
        return tmp_path / "profile.json"

    return write


def test_the_table_says_that_its_figures_are_estimates():
    result = plan(*CLUSTER, *LINES, "--show", 20)
    assert result.exit_code == 0
    assert "decoupled" in result.stdout and "plain" in result.stdout
    assert "estimates, not measured" in result.stdout
    assert "never waits" in result.stdout


def test_plan_without_a_command_plans_drafters_and_verifiers():
    assert run(*CLUSTER, *LINES).stdout == plan(*CLUSTER, *LINES).stdout != ""


def test_other_plans_and_help_are_still_reached():
    assert "MiB (estimate)" in run("graphs").stdout
    assert "ladder" in run("--help").stdout
    assert "ladder" in run().output


def test_the_file_holds_all_plans_the_best_first(tmp_path):
    report = written(tmp_path)
    speeds = [report["best"]["tokens_per_s"], *(other["tokens_per_s"] for other in report["others"])]
    assert report["estimate"] is True
    assert speeds == sorted(speeds, reverse=True)
    assert {report["best"]["mode"], *(other["mode"] for other in report["others"])} == {"plain", "coupled", "decoupled"}


def test_only_so_many_runners_up_are_printed():
    lengths = [len(plan(*CLUSTER, *LINES, "--show", n).stdout.splitlines()) for n in (0, 3)]
    assert lengths[1] == lengths[0] + 3


def test_the_papers_tau_gives_other_figures(tmp_path):
    exact, paper = written(tmp_path), written(tmp_path, "--tau", "paper")
    assert paper["tau"] == "paper"
    assert exact["others"] != paper["others"]


def test_exits_never_make_the_plan_slower(tmp_path):
    few_requests = ["--batch", 64]
    before = written(tmp_path, *few_requests)["best"]["tokens_per_s"]
    few = written(tmp_path, *few_requests, "--exits", "0.01", "--exit-cost", "9", "--exit-width", "9")
    many = written(tmp_path, *few_requests, "--exits", "0.9")
    assert few["best"]["tokens_per_s"] == before < many["best"]["tokens_per_s"]
    assert many["best"]["has_exits"] and not few["best"]["has_exits"]


def test_on_one_host_groups_are_whole(tmp_path):
    found = written(tmp_path, "--gpus", 5, "--batch", 8, "--one-host")
    plans = [found["best"], *found["others"]]
    assert {(p["draft_gpus"] + p["verify_gpus"], p["batch"]) for p in plans} == {(2, 4), (3, 8), (4, 8), (5, 8)}


def test_a_profile_is_fitted_and_its_error_shown(profile):
    path = profile(draft={"rows": [[1, 1.0], [8, 1.3], [64, 1.2]]})
    result = plan(*CLUSTER, "--profile", path)
    assert result.exit_code == 0
    assert "off the profiled rows" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--gpus", "0"], "`--gpus` is 0, outside 1 to 65536"),
        (["--batch", "0"], "`--batch` is 0, outside 1 to 16777216"),
        (["--accept", "1.2"], "`--accept` is 1.2, outside 0.0 to 1.0"),
        (["--tau", "x"], "`--tau` is 'x', which does not exist"),
        (["--tau", "paper", "--exits", "0.5"], "exits are given, and `tau` is 'paper'"),
        (["--exit-cost", "0.5"], "`--exit-cost` is 0.5, outside 1.0 to 100.0"),
        (["--max-window", "65"], "`--max-window` is 65, outside 1 to 64"),
        (["--verify-gpus", "4"], "`--verify-ms` holds 2 lines for 1 verifiers"),
        (["--draft-ms", "-1+2"], "`--draft-ms` holds '-1+2', which is no line in milliseconds"),
        (["--draft-ms", "1+2+3"], "`--draft-ms` is '1+2+3', with a time per row"),
        (["--draft-ms", "1"], "`--draft-ms` holds '1', which is no line in milliseconds"),
        (["--gpus", "1"], "1 devices, and the smallest verifier needs 2"),
        (["--verify-ms", "0+0,0+0"], "a verifier on 2 devices takes 0.0 ms a step"),
        (["--profile", "x.json"], "`--profile` is given beside `--draft-ms` or `--verify-ms`"),
    ],
)
def test_bad_flags_are_one_clear_error(arguments, cause):
    error = plan(*CLUSTER, *LINES, *arguments).exception
    assert isinstance(error, SpecRolloutError)
    assert error.cause == cause


def test_times_have_to_be_given():
    error = plan(*CLUSTER).exception
    assert isinstance(error, SpecRolloutError)
    assert error.cause == "what drafting and verifying take is not given"
