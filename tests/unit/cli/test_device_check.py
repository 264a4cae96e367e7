"""`doctor --gpu`: one screen, whatever becomes of the process that checks."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from vllm_specrollout.cli.commands import app
from vllm_specrollout.cli.device_check import MARK, check_device
from vllm_specrollout.errors import ConfigError

FOUND = {
    "versions": {"vllm-specrollout": "0.1.0", "vllm": "0.32.0"},
    "device": "A device (sm_90, 80 GiB)",
    "model": "random",
    "dtype": "bfloat16",
    "shape": "tree",
    "shape_reason": "",
    "state": "passed",
    "passed": ["verify", "chains"],
    "failed": {},
    "seconds": 1.25,
}


def says(found: object) -> tuple[str, ...]:
    return ("-c", f"print('noise'); print({MARK + json.dumps(found)!r})")


FAILED = {**FOUND, "state": "failed", "shape": "chain", "shape_reason": "why", "failed": {"trees": "token 3 for 4"}}


def test_a_device_that_passes_says_so_first_and_fits_a_screen() -> None:
    report = check_device("", says(FOUND))
    lines = report.as_text().splitlines()
    assert report.is_healthy and lines[0] == "spec rollout on this device: all parts passed"
    assert len(lines) <= 24 and any(line.split() == ["verify", "passed"] for line in lines)
    assert json.loads(report.as_json()) == FOUND


def test_what_failed_is_named_with_what_is_drafted_then() -> None:
    report = check_device("", says(FAILED))
    text = report.as_text()
    assert not report.is_healthy and text.startswith("spec rollout on this device: 1 part(s) failed")
    assert "FAILED: token 3 for 4" in text and "chains only (why)" in text and "hint:" in text


def test_a_process_that_dies_leaves_its_last_lines() -> None:
    code = "import os, sys; print('illegal address', file=sys.stderr, flush=True); os._exit(7)"
    report = check_device("", ("-c", code))
    assert not report.is_healthy and report.status == 7
    assert "died (exit status 7)" in report.as_text() and "illegal address" in report.as_text()
    assert json.loads(report.as_json())["state"] == "died"


def test_one_that_never_ends_and_a_host_without_a_device_are_errors_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="did not end"):
        check_device("", ("-c", "import time; time.sleep(60)"), timeout_s=0.2)
    with pytest.raises(ConfigError, match="no CUDA device") as raised:
        check_device("", says({"cause": "there is no CUDA device here", "hint": "go elsewhere"}))
    assert raised.value.hint == "go elsewhere"


@pytest.mark.parametrize(("found", "status"), [(FOUND, 0), (FAILED, 1)])
def test_the_exit_status_tells_whether_all_passed(monkeypatch: pytest.MonkeyPatch, found: object, status: int) -> None:
    monkeypatch.setattr(check_device, "__defaults__", (says(found), 60.0))
    assert CliRunner().invoke(app, ["doctor", "--gpu"]).exit_code == status
