import pytest

pytest.importorskip("schemathesis")

import schemathesis
from hypothesis import settings

from tests.unit.server.conftest import HISTORY, WITH_MODEL, FakeEngine, wired

KEY = "secret"


def described(settings_of_engine, keys):
    return schemathesis.openapi.from_asgi("/openapi.json", wired(FakeEngine({"a"}, settings_of_engine), keys))


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


open_server = described(WITH_MODEL, None)
locked_server = described(HISTORY, [KEY])
server_without_history = described(None, None)


@open_server.parametrize()
@settings(max_examples=30, deadline=None)
def test_an_open_server_answers_as_it_says(case):
    assert case.call_and_validate().status_code < 500


@locked_server.parametrize()
@settings(max_examples=15, deadline=None)
def test_a_server_with_a_key_answers_as_it_says(case):
    assert case.call_and_validate(headers={"Authorization": f"Bearer {KEY}"}).status_code < 500


@locked_server.parametrize()
@settings(max_examples=10, deadline=None)
def test_without_the_key_nothing_is_answered_but_401(case):
    assert case.call().status_code in (401, 405)


@server_without_history.parametrize()
@settings(max_examples=10, deadline=None)
def test_a_server_without_history_never_fails(case):
    assert case.call().status_code in (400, 403, 405, 409, 422)
