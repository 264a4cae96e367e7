"""What a running engine says of its drafters, and what a person reads of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import vllm_specrollout
from tests.unit.cli.served import answering, serving
from vllm_specrollout.cli import doctor
from vllm_specrollout.cli.commands import app
from vllm_specrollout.errors import UnsupportedError

ALIVE = {"state": "alive", "failed": 0, "error": "", "steps": 0}
FAILED = {"state": "probation", "failed": 2, "error": "OSError: no space left on device", "steps": 255}
GONE = {"state": "given up", "failed": 5, "error": "OSError: no space left on device", "steps": 0}
SHORT = {**ALIVE, "most_tokens": 2044}
SICK = {"budget": ALIVE, "drafters": {"history": GONE, "ngram": FAILED, "model": SHORT}}


def test_ranks_that_do_not_draft_say_nothing_and_an_engine_without_spec_rollout_is_refused() -> None:
    config = SimpleNamespace(additional_config={"spec_rollout": {"drafters": ["ngram"]}})
    told = {"spec_rollout_health": [SICK, {}]}
    engine = SimpleNamespace(vllm_config=config, collective_rpc=lambda method, args: told[method])
    assert vllm_specrollout.read_drafters(engine) == {"engines": [SICK]}
    config.additional_config = {}
    with pytest.raises(UnsupportedError, match="spec rollout is off"):
        vllm_specrollout.read_drafters(engine)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of two engines."""
    monkeypatch.setattr(doctor, "_vllm_findings", pytest.fail)
    told = json.dumps({"engines": [SICK, {"budget": ALIVE, "drafters": {}}]}).encode()
    with serving(lambda own: answering(200 if own.path == "/spec_rollout/drafters" else 404, told)(own)) as url:
        yield url


def test_a_server_is_asked_without_vllm(server: str) -> None:
    done = CliRunner().invoke(app, ["doctor", "--server", server])
    assert done.exit_code == 1 and "asking vLLM" not in done.output
    assert done.stdout.startswith("spec rollout does not work there (lines marked !)\n\nrunning\n! drafter history")


def test_doctor_says_which_drafters_of_a_server_work(server: str) -> None:
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
