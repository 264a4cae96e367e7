"""`specrollout plan decoupled`: a table, a file, and one clear error for what makes no sense."""

import json

import pytest
from typer.testing import CliRunner

from vllm_specrollout.cli.commands import app
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


HOST = ["--gpus", "2", "--batch", "2", "--max-window", "2", "--rehearse"]
TIMES = ["--draft-ms", "4+0.1*b+0.05*n", "--verify-ms", "30+1*b+0.3*n"]


def rehearsed(tmp_path, *arguments):
    result = plan(*HOST, *TIMES, "--json", tmp_path / "plan.json", *arguments)
    assert result.exit_code == 0, result.exception
    return json.loads((tmp_path / "plan.json").read_text()), result.stdout


def test_plans_of_one_host_are_ranked_by_rehearsal_and_both_figures_are_printed(tmp_path):
    report, text = rehearsed(tmp_path, "--match", "0.8,0.9")
    assert "as rehearsed" in text and "by formula" in text and "estimates, not measured" in text
    plans = [report["best"], *report["others"]]
    assert {p["mode"] for p in plans} == {"plain", "coupled", "decoupled"} and report["rehearsed"] is True
    speeds = [p["rehearsed"]["tokens_per_s"] for p in plans]
    assert speeds == sorted(speeds, reverse=True)
    for p in plans:
        assert f"{p['rehearsed']['tokens_per_s']:.1f}" in text and f"{p['tokens_per_s']:.1f}" in text


def test_ranks_come_from_a_file_or_are_drawn_from_one_share(tmp_path):
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps([0, 0, 0, 1] * 50))
    from_file, _ = rehearsed(tmp_path, "--ranks", path)
    from_share, _ = rehearsed(tmp_path, "--accept", 0.75)
    assert from_file["best"]["mode"] == "decoupled"
    speeds = [found["best"]["rehearsed"]["tokens_per_s"] for found in (from_file, from_share)]
    assert speeds[0] > speeds[1], "each miss is an exit"


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ([], "how drafts match is given 0 times"),
        (["--accept", "0.8", "--match", "0.8"], "how drafts match is given 2 times: --match, --accept"),
        (["--match", "0.8", "--fan-out", "2"], "`--fan-out` is 2, and match rates are known of 1"),
        (["--match", "0.8,0.7"], "match rates are [0.8, 0.7]"),
        (["--match", "0.8", "--most-nodes", "0"], "`most_nodes` is 0, outside 1 to 64"),
        (["--match", "0.8", "--tau", "paper"], "a rehearsal has a verifier that never waits, and `tau` is 'paper'"),
        (["--ranks", "nowhere.json"], "`--ranks` is `nowhere.json`, which cannot be read as JSON"),
    ],
)
def test_bad_flags_of_a_rehearsal_are_one_clear_error(arguments, cause):
    error = plan(*HOST, *TIMES, *arguments).exception
    assert isinstance(error, SpecRolloutError)
    assert error.cause.startswith(cause)


def test_what_only_a_rehearsal_uses_is_refused_without_one():
    for flag, value in (("--match", "0.8"), ("--ranks", "x.json"), ("--fan-out", "2")):
        error = plan(*CLUSTER, *LINES, flag, value).exception
        assert isinstance(error, SpecRolloutError)
        assert error.cause == f"`{flag}` is given, and nothing is rehearsed"
    error = plan("--gpus", "2", "--batch", "2", *LINES).exception
    assert isinstance(error, SpecRolloutError)
    assert error.cause == "it is not given how often a drafted token matches"
