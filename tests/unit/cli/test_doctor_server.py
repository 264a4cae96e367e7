"""What a running engine says of its drafters, and what a person reads of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import vllm_specrollout
from tests.unit.cli.served import serving
from vllm_specrollout.cli import doctor
from vllm_specrollout.cli.commands import app
from vllm_specrollout.errors import ConfigError, UnsupportedError

ALIVE = {"state": "alive", "failed": 0, "error": "", "steps": 0}
FAILED = {"state": "probation", "failed": 2, "error": "OSError: no space left on device", "steps": 255}
GONE = {"state": "given up", "failed": 5, "error": "OSError: no space left on device", "steps": 0}
SHORT = {**ALIVE, "most_tokens": 2044}
SICK = {"budget": ALIVE, "drafters": {"history": GONE, "ngram": FAILED, "model": SHORT}}


class Engine:
    def __init__(self, settings: dict[str, Any] | None) -> None:
        self.vllm_config = SimpleNamespace(additional_config={"spec_rollout": settings} if settings else {})

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        assert method == "spec_rollout_health"
        return [SICK, {}]


def test_ranks_that_do_not_draft_say_nothing() -> None:
    assert vllm_specrollout.read_drafters(Engine({"drafters": ["ngram"]})) == {"engines": [SICK]}


def test_an_engine_without_spec_rollout_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="spec rollout is off"):
        vllm_specrollout.read_drafters(Engine(None))


@pytest.fixture
def server() -> Iterator[str]:
    """A server with a key, of two engines."""

    def answer(path: str, headers: Any) -> tuple[int, str]:
        is_right = path == "/spec_rollout/drafters" and headers["Authorization"] == "Bearer secret"
        return (200 if is_right else 401), json.dumps({"engines": [SICK, {"budget": ALIVE, "drafters": {}}]})

    with serving(answer) as url:
        yield url


def test_a_server_is_asked_without_vllm(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setattr(doctor, "_vllm_findings", pytest.fail)
    done = CliRunner().invoke(app, ["doctor", "--server", server])
    assert done.exit_code == 1 and "asking vLLM" not in done.output
    assert done.stdout.startswith("spec rollout does not work there (lines marked !)\n\nrunning\n! drafter history")


def test_doctor_says_which_drafters_of_a_server_work(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    report = doctor.examine(server=server)
    assert [finding for finding in report.findings if finding.is_problem] == [] and not report.is_healthy
    assert [(finding.name, finding.is_problem) for finding in report.running] == [
        ("drafter history of engine 0", True),
        ("drafter ngram of engine 0", True),
        ("drafter model of engine 0", False),
        ("budget of engine 0", False),
        ("budget of engine 1", False),
    ]
    text = report.as_text()
    assert "given up; failed 5 times, last: OSError: no space left on device" in text
    assert "is tried again in 255 steps; failed 2 times" in text
    assert "works; nobody beyond 2044 tokens" in text


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://x", "http://127.0.0.1:1", "http://\x00", "http://["])
def test_a_server_that_cannot_be_asked_is_one_clear_error(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        doctor.ask_server(address)
    assert "hint:" in str(caught.value)


def test_a_missing_key_is_one_clear_error(server: str) -> None:
    with pytest.raises(ConfigError, match="401"):
        doctor.ask_server(server)
