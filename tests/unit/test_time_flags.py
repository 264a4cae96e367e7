import json

import pytest

from vllm_specrollout.decoupled.times import AffineTime
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.time_flags import draft_time, read_profile, verify_times

LINE = {"fixed_ms": 13, "per_request_ms": 0.04, "per_row_ms": 0.03}


@pytest.fixture
def file(tmp_path):
    def write(body):
        path = tmp_path / "times.json"
        path.write_text(body if isinstance(body, str) else json.dumps(body))
        return path

    return write


@pytest.mark.parametrize("text", ["0.8+0.002", "0.8+0.002*b", " 0.8 + 0.002*b "])
def test_a_line_is_fixed_and_per_request(text):
    assert draft_time(text, "--draft-ms") == AffineTime(0.002, 0.8)


def test_verifiers_have_a_time_per_row_and_one_line_each():
    lines = verify_times("13+0.04*b+0.03*n,8+1", "--verify-ms", (2, 4))
    assert lines == {2: AffineTime(0.04, 13.0, 0.03), 4: AffineTime(1.0, 8.0)}


def test_a_profile_holds_lines_or_rows(file):
    rows = [[1, 0, 11.0], [1, 4, 13.0], [8, 0, 18.0], [8, 4, 34.0]]
    draft, verify = read_profile(file({"draft": LINE, "verify": {"4": LINE, "2": {"rows": rows}}}), "--profile")
    assert draft.time == verify[4].time == AffineTime(0.04, 13.0, 0.03)
    assert list(verify) == [2, 4]
    assert verify[2].time.per_row_ms == pytest.approx(0.5)
    assert verify[2].worst_error < 1e-6


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("nonsense", "which cannot be read as JSON"),
        ([], "which holds no JSON object"),
        ({}, "does not hold the times of a drafter and of a verifier"),
        ({"draft": LINE, "verify": {}}, "does not hold the times"),
        ({"draft": LINE, "verify": {"x": LINE}}, "has a verifier on 'x' devices"),
        ({"draft": {"fixed_ms": "1"}, "verify": {"1": LINE}}, "`draft` in .* is no time: '1' is no number"),
        ({"draft": {"rows": [[1]]}, "verify": {"1": LINE}}, r"rows are \[batch, ms\]"),
        ({"draft": {"per_request_ms": 1}, "verify": {"1": LINE}}, "neither the terms of a line nor rows"),
        ({"draft": {"rows": [[1, 2]]}, "verify": {"1": LINE}}, "`draft` in .* does not tell the 2 terms"),
        ({"draft": {"fixed_ms": -1}, "verify": {"1": LINE}}, "`fixed_ms` is -1.0, not a time"),
    ],
)
def test_a_file_that_says_something_else_is_refused(file, body, cause):
    with pytest.raises(ConfigError, match=cause):
        read_profile(file(body), "--profile")
