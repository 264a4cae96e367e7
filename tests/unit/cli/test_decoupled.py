"""`specrollout plan decoupled`: a table, a file, and one clear error for what makes no sense."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_specrollout.cli.commands import app
from vllm_specrollout.cli.plan import GONE, fit_line, read_profile
from vllm_specrollout.cluster.rates import AffineTime
from vllm_specrollout.errors import ConfigError, SpecRolloutError

SIZES = ["--gpus", "2", "--batch", "2", "--max-window", "2", "--one-host"]
TIMES = ["--draft-ms", "4 + 0.1*b + 0.05*n", "--verify-ms", "30+1*b+0.3*n"]
LINE = {"fixed_ms": 13, "per_request_ms": 0.04, "per_row_ms": 0.03}
_TERM = st.floats(0.01, 10.0)


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def plan(*arguments):
    return run("decoupled", *SIZES, *arguments)


def written(tmp_path, *arguments):
    result = plan("--json", tmp_path / "plan.json", *arguments)
    assert result.exit_code == 0, result.exception
    return json.loads((tmp_path / "plan.json").read_text()), result.stdout


@pytest.fixture
def file(tmp_path):
    def write(body):
        path = tmp_path / "times.json"
        path.write_text(body if isinstance(body, str) else json.dumps(body))
        return path

    return write


def test_plans_are_rehearsed_and_written_the_best_first(tmp_path):
    report, text = written(tmp_path, *TIMES, "--match", "0.8,0.9")
    assert "rehearsed estimates, not measured" in text and "never waits" in text and "by paper" in text
    plans = [report["best"], *report["others"]]
    assert {p["mode"] for p in plans} == {"plain", "coupled", "decoupled"} and report["estimate"] is True
    speeds = [p["tokens_per_s"] for p in plans]
    assert speeds == sorted(speeds, reverse=True)
    assert all(f"{p['tokens_per_s']:.1f}" in text for p in plans)


def test_ranks_come_from_a_file_or_are_drawn_from_one_share(tmp_path, file):
    from_file, _ = written(tmp_path, *TIMES, "--ranks", file([0, 0, 0, 1] * 50))
    from_share, _ = written(tmp_path, *TIMES, "--accept", 0.75)
    assert from_file["best"]["mode"] == "decoupled"
    assert from_file["best"]["tokens_per_s"] > from_share["best"]["tokens_per_s"], "each miss is an exit"


def test_plan_without_a_command_plans_drafters_and_verifiers():
    arguments = [*SIZES, *TIMES, "--accept", "0.5"]
    assert run(*arguments).stdout == run("decoupled", *arguments).stdout != ""
    assert run(*arguments[:6], "--rehearse", *arguments[7:]).stdout == run(*arguments).stdout, "its old name"


def test_other_plans_and_help_are_still_reached():
    assert "MiB (estimate)" in run("graphs").stdout
    assert "graphs" in run("--help").stdout
    assert "graphs" in run().output


def test_only_so_many_runners_up_are_printed():
    lengths = [len(plan(*TIMES, "--accept", "0.5", "--show", n).stdout.splitlines()) for n in (0, 1)]
    assert lengths[1] == lengths[0] + 1


def test_a_profile_is_fitted_and_its_error_shown(file):
    path = file({"draft": {"rows": [[1, 1.0], [8, 1.3], [64, 1.2]]}, "verify": {"1": LINE}})
    result = plan("--profile", path, "--accept", "0.5")
    assert result.exit_code == 0, result.exception
    assert "off the profiled rows" in result.stdout


@pytest.mark.parametrize("flag", GONE)
def test_a_flag_of_the_formulas_says_once_what_takes_its_place(flag):
    for arguments in (["decoupled", *SIZES], SIZES):
        error = run(*arguments, *TIMES, flag, "1").exception
        assert isinstance(error, SpecRolloutError)
        assert error.cause.startswith(f"`{flag}` is gone") and error.hint == GONE[flag]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--gpus", "0"], "`--gpus` is 0, outside 1 to 65536"),
        (["--batch", "0"], "`--batch` is 0, outside 1 to 16777216"),
        (["--max-window", "65"], "`--max-window` is 65, outside 1 to 64"),
        (["--accept", "1.2"], "`--accept` is 1.2, outside 0.0 to 1.0"),
        ([], "how drafts match is given 0 times"),
        (["--accept", "0.8", "--match", "0.8"], "how drafts match is given 2 times: --match, --accept"),
        (["--match", "0.8", "--fan-out", "2"], "`--fan-out` is 2, and match rates are known of 1"),
        (["--match", "0.8,0.7"], "match rates are [0.8, 0.7]"),
        (["--ranks", "nowhere.json"], "`--ranks` is `nowhere.json`, which cannot be read as JSON"),
        (["--accept", "0.8", "--verify-gpus", "1,2"], "`--verify-ms` holds 1 lines for 2 verifiers"),
        (["--accept", "0.8", "--draft-ms", "-1+2"], "`--draft-ms` holds '-1+2', which is no line in milliseconds"),
        (["--accept", "0.8", "--draft-ms", "1"], "`--draft-ms` holds '1', which is no line in milliseconds"),
        (["--accept", "0.8", "--verify-gpus", "4"], "2 devices, and the smallest verifier needs 4"),
        (["--accept", "0.8", "--verify-ms", "0+0"], "a verifier on 1 devices takes 0.0 ms a step"),
        (["--accept", "0.8", "--profile", "x.json"], "`--profile` is given beside `--draft-ms` or `--verify-ms`"),
    ],
)
def test_bad_flags_are_one_clear_error(arguments, cause):
    error = plan(*TIMES, *arguments).exception
    assert isinstance(error, SpecRolloutError)
    assert error.cause.startswith(cause)


def test_times_have_to_be_given():
    error = plan("--accept", "0.8").exception
    assert isinstance(error, SpecRolloutError)
    assert error.cause == "what drafting and verifying take is not given"


def test_a_profile_holds_lines_or_rows(file):
    rows = [[1, 0, 11.0], [1, 4, 13.0], [8, 0, 18.0], [8, 4, 34.0]]
    draft, verify, worst = read_profile(file({"draft": LINE, "verify": {"4": LINE, "2": {"rows": rows}}}), "--profile")
    assert draft == verify[4] == AffineTime(0.04, 13.0, 0.03)
    assert verify[2].per_row_ms == pytest.approx(0.5)
    assert worst < 1e-6


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("nonsense", "which cannot be read as JSON"),
        ([], "does not hold the times of a drafter and of a verifier"),
        ({"draft": LINE, "verify": {}}, "does not hold the times"),
        ({"draft": LINE, "verify": {"x": LINE}}, "has a verifier on 'x' devices"),
        ({"draft": {"fixed_ms": "1"}, "verify": {"1": LINE}}, "`draft` in .* is no time: '1' is no number"),
        ({"draft": {"rows": 3}, "verify": {"1": LINE}}, "`draft` in .* is no time"),
        ({"draft": {"rows": [[1]]}, "verify": {"1": LINE}}, r"rows are \[batch, ms\]"),
        ({"draft": {"per_request_ms": 1}, "verify": {"1": LINE}}, "neither the terms of a line nor rows"),
        ({"draft": {"rows": [[1, 2]]}, "verify": {"1": LINE}}, "`draft` in .* does not tell the 2 terms"),
        ({"draft": {"fixed_ms": -1}, "verify": {"1": LINE}}, "`fixed_ms` is -1.0, not a time"),
    ],
)
def test_a_file_that_says_something_else_is_refused(file, body, cause):
    with pytest.raises(ConfigError, match=cause):
        read_profile(file(body), "--profile")


@given(fixed=_TERM, per_request=_TERM, per_row=_TERM)
def test_a_fit_finds_the_line_that_made_the_rows(fixed, per_request, per_row):
    line = AffineTime(per_request, fixed, per_row)
    rows = [[b, n, line.ms(b, n)] for b, n in ((1, 0), (8, 0), (64, 0), (8, 4), (64, 8))]
    found, worst = fit_line(rows)
    shape = (found.per_request_ms, found.fixed_ms, found.per_row_ms)
    assert shape == pytest.approx((per_request, fixed, per_row), rel=1e-4, abs=1e-6)
    assert worst < 1e-6


def test_no_term_of_a_fit_is_negative_and_its_error_is_told():
    found, worst = fit_line([[1, 3.0], [2, 2.0], [4, 1.0]])
    assert found.per_request_ms == 0.0 and 1.0 < found.fixed_ms < 3.0
    assert worst == pytest.approx(max(abs(found.fixed_ms / ms - 1.0) for ms in (3.0, 2.0, 1.0)))


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        ([[1, 1.0], [2, float("nan")]], "a time that is not above 0"),
        ([[0, 1.0], [2, 1.0]], "a batch below 1"),
        ([[1, 0.0], [2, 1.0]], "a time that is not above 0"),
        ([[2, 1.0], [2, 1.0]], "does not tell the 2 terms of a line apart"),
        ([[1, 3, 1.0], [2, 3, 2.0]], "does not tell the 3 terms of a line apart"),
    ],
)
def test_rows_that_cannot_be_fitted_are_refused(rows, cause):
    with pytest.raises(ConfigError, match=cause):
        fit_line(rows)
