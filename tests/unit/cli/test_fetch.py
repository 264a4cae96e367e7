"""What a server answers, or who sits where one should be: no key to strangers, no answer without an end."""

from __future__ import annotations

import io
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from tests.unit.cli.served import Work, answering, serving
from vllm_specrollout.cli import fetch
from vllm_specrollout.errors import ConfigError


def got(url: str, path: str = "/metrics", **more: Any) -> bytes:
    found = io.BytesIO()
    fetch.fetch(url, path, found, "says nothing", "start it", **more)
    return found.getvalue()


def refused(work: Work, path: str = "/metrics", **more: Any) -> str:
    with serving(work) as url, pytest.raises(ConfigError) as caught:
        got(url, path, **more)
    assert caught.value.cause.startswith(f"`{url}` says nothing: ")
    return str(caught.value).partition("says nothing: ")[2]


@pytest.mark.parametrize("base", ["", "/", "/behind/a/gateway"])
def test_an_answer_comes_whole_and_is_asked_for_with_the_key(monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret\n")
    seen = []

    def work(handler: BaseHTTPRequestHandler) -> None:
        seen.append((handler.path, handler.headers["Authorization"]))
        answering(200, b"x" * 3_000_000)(handler)

    with serving(work) as url:
        assert got(url + base) == b"x" * 3_000_000
    assert seen == [(base.rstrip("/") + "/metrics", "Bearer secret")]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_told_and_not_followed(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    seen: list[str] = []
    with serving(lambda handler: seen.append(handler.path)) as other:
        said = refused(answering(status, Location=other + "/metrics"))
    assert f"to `{other}/metrics`, which is not followed" in said and seen == []


def test_an_answer_without_an_end_is_left_when_it_is_too_large() -> None:
    def work(handler: BaseHTTPRequestHandler) -> None:
        answering(200)(handler)
        while True:
            handler.wfile.write(b"x" * 100_000)

    assert refused(work, most_bytes=2 << 20).startswith("its answer is larger than 2 MiB")


@pytest.mark.parametrize("where", ["headers", "body"])
def test_an_answer_that_drips_is_left_at_the_deadline(where: str) -> None:
    over = threading.Event()

    def work(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        if where == "body":
            handler.end_headers()
        handler.wfile.write(b"".join(handler._headers_buffer) if where == "headers" else b"")
        while not over.wait(0.01):
            handler.wfile.write(b"x")

    assert refused(work, seconds=0.3).startswith("its answer did not end within 0.3 s")
    over.set()


def test_an_answer_that_breaks_off_is_no_answer() -> None:
    assert refused(answering(200, b"x" * 10, Content_Length="25")).startswith("its answer broke off: 15 bytes of 25")


def test_why_there_is_nothing_is_said_with_the_way_out() -> None:
    missing = answering(404, b'{"detail":"Not Found"}')
    said = refused(missing, "/spec_rollout/rollout")
    assert "no routes of spec rollout" in said and "hint: start it with VLLM_PLUGINS=spec_rollout" in said
    assert "VLLM_PLUGINS" not in refused(missing)
    assert "hint: set VLLM_API_KEY" in refused(answering(401, b'{"error":"Unauthorized"}'))
    ours = answering(409, b'{"error": {"message": "spec rollout is off in this engine\\n\\nhint: x"}}')
    assert refused(ours, "/spec_rollout/rollout") == "spec rollout is off in this engine\n\nhint: start it"
    for body in (b"", b"[", b"[]", b'{"error": 3}', b"\xff"):
        assert refused(answering(500, body)).startswith("HTTP 500 Internal Server Error")


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://127.0.0.1:1", "http://\x00", "http://[", "http://x:y", "http://"]
)
def test_an_address_that_is_none_is_one_clear_error(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        got(url)
    assert caught.value.hint
