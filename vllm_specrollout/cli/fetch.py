"""What a running server answers: `status`, `report` and `doctor` ask here, and nowhere else.

The key goes to the address that the user named and to no other, so redirects are not followed. An answer has a most of
bytes and a deadline: whoever answers for ever fills no memory and no disk.
"""

from __future__ import annotations

import http.client
import io
import os
import socket
import threading
import urllib.parse
from contextlib import suppress
from email.message import Message
from http import HTTPStatus
from typing import BinaryIO

import msgspec

from vllm_specrollout.errors import ConfigError, named

MOST_BYTES = 64 << 20
"""Of an answer that is read into memory."""
SECONDS = 60.0
_CONNECT_S = 10.0
_PART_BYTES = 1 << 20


class _NoAnswerError(Exception):
    """What came is not what was asked for."""

    def __init__(self, cause: str, hint: str = "") -> None:
        """Args:
        hint: the way out, where the answer says it.
        """
        super().__init__(cause)
        self.hint = hint


def fetch(
    url: str, path: str, into: BinaryIO, lacks: str, hint: str, most_bytes: int = MOST_BYTES, seconds: float = SECONDS
) -> Message:
    """Copy what a server answers, asked with the key in VLLM_API_KEY.

    Args:
        url: of the server, such as `http://localhost:8000`.
        path: what is asked for there.
        lacks: what it does not do where there is no answer, for the error.
        hint: the way out then.
        seconds: for all of it.

    Returns:
        the answer's headers.

    Raises:
        ConfigError: there is no answer that can be used.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"`{url}` is no address of a server", "give one like http://localhost:8000")
    late = threading.Event()
    try:
        answer = _asked(url.rstrip("/"), path, into, most_bytes, seconds, late)
        if late.is_set():
            raise TimeoutError
    except (OSError, ValueError, http.client.HTTPException, _NoAnswerError) as error:
        cause = f"its answer did not end within {seconds:g} s" if late.is_set() else str(error) or type(error).__name__
        raise ConfigError(f"`{url}` {lacks}: {cause}", getattr(error, "hint", "") or hint) from None
    return answer.headers


def read(url: str, path: str, lacks: str, hint: str) -> bytes:
    """A short answer; arguments and errors are those of `fetch`."""
    found = io.BytesIO()
    fetch(url, path, found, lacks, hint)
    return found.getvalue()


def _asked(
    url: str, path: str, into: BinaryIO, most_bytes: int, seconds: float, late: threading.Event
) -> http.client.HTTPResponse:
    at = urllib.parse.urlsplit(url + path)
    kind = http.client.HTTPSConnection if at.scheme == "https" else http.client.HTTPConnection
    connection = kind(at.hostname or "", at.port, timeout=_CONNECT_S)
    try:
        connection.connect()
        line = connection.sock
        # a server that is busy says nothing for a while, and one that means harm a byte now and then
        line.settimeout(seconds)
        watch = threading.Timer(seconds, _end, (line, late))
        watch.daemon = True
        watch.start()
        try:
            key = os.environ.get("VLLM_API_KEY", "").strip()
            connection.request("GET", at.path, headers={"Authorization": f"Bearer {key}"} if key else {})
            answer = connection.getresponse()
            _check(answer, path)
            _copy(answer, into, most_bytes)
        finally:
            watch.cancel()
        return answer
    finally:
        connection.close()


def _end(line: socket.socket, late: threading.Event) -> None:
    late.set()
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)


def _copy(answer: http.client.HTTPResponse, into: BinaryIO, most_bytes: int) -> None:
    count = 0
    while part := answer.read(_PART_BYTES):
        count += len(part)
        if count > most_bytes:
            raise _NoAnswerError(f"its answer is larger than {most_bytes >> 20} MiB")
        into.write(part)
    if answer.length:
        raise _NoAnswerError(f"its answer broke off: {answer.length} bytes of {answer.length + count} are missing")


def _check(answer: http.client.HTTPResponse, path: str) -> None:
    """Raises: it is none, and why."""
    if answer.status == HTTPStatus.OK:
        return
    said = f"HTTP {answer.status} {answer.reason}"
    if 300 <= answer.status < 400:
        to = named(answer.getheader("Location", ""))
        raise _NoAnswerError(f"{said} to `{to}`, which is not followed", "give that address, if you trust it")
    if answer.status == HTTPStatus.UNAUTHORIZED:
        raise _NoAnswerError(f"{said}: the server asks for another key", "set VLLM_API_KEY to the server's")
    with suppress(msgspec.MsgspecError, KeyError, TypeError):
        # our routes' own words
        said = str(msgspec.json.decode(answer.read(_PART_BYTES))["error"]["message"]).partition("\n")[0]
        raise _NoAnswerError(said)
    if answer.status == HTTPStatus.NOT_FOUND and path.startswith("/spec_rollout/"):
        raise _NoAnswerError(
            f"{said}: it has no routes of spec rollout, which vLLM adds only where VLLM_PLUGINS names them",
            "start it with VLLM_PLUGINS=spec_rollout, and --spec-rollout",
        )
    raise _NoAnswerError(said)
