"""Messages come out as they went in, and whatever else comes is refused with one clear error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.cluster.group.messages import (
    VERSION,
    Attach,
    Call,
    Cancel,
    Detach,
    GroupMessageError,
    Here,
    Link,
    Message,
    Piece,
    Progress,
    Race,
    Report,
    Run,
    Running,
    Want,
    decode,
    encode,
)

MESSAGES: list[Message] = [
    Call(3),
    Here(8, 3, ("1-0",)),
    Run("1-0", (5, 6), {"seed": 2**61, "stop": ["a"], "logit_bias": {"7": 1.0}}, (9,), True),
    Cancel("1-0"),
    Want("1-0"),
    Progress(
        (Piece("1-0", 2, (3, 4), (-0.5, -1.25)), Piece("1-1", 0, (), (), "error", "x" * 900)),
        "ngram",
        (Link("w1", ("1-0",)),),
    ),
    Report("ngram", (Running("1-0", True, 10, 4),), ("1-1",), "ipc:///tmp/d", "small", (Link("w1", ("1-0",)),)),
    Race("1-0", "history"),
    Attach("w1", "ipc:///tmp/d", ("1-0", "1-2")),
    Detach("w1"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    assert decode(encode(message)) == message


def body(version: Any = VERSION, kind: Any = "race", **fields: Any) -> bytes:
    return json.dumps({"v": version, "message": {"kind": kind, **(fields or {"request": "r", "method": "m"})}}).encode()


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"\xff", "text"),
        (b"[]", "value"),
        (b"[" * 100_000, "value"),
        (b'{"v": 5, "message": ' + b"[" * 100_000, "text"),
        (body(version=VERSION - 1), "version"),
        (body(version=str(VERSION)), "value"),
        (json.dumps({"v": 4, "kind": "cancel", "request": "7"}).encode(), "version"),
        (json.dumps({"v": VERSION, "kind": "cancel", "request": "7"}).encode(), "value"),
        (body(kind="fly"), "value"),
        (body(kind=["race"]), "value"),
        (body(request="r", method="m", more=1), "value"),
        (body(kind="cancel"), "value"),
        (body(request="r"), "value"),
        (body(request="r", method=3), "value"),
        (body(request="r", method="m" * 300), "value"),
        (body(kind="here", places=True), "value"),
        (body(kind="here", places=-1), "value"),
        (body(kind="run", request="r", prompt=[1, "2"], params={}), "value"),
        (body(kind="run", request="r", prompt=[1], params=[]), "value"),
        (body(kind="progress", pieces=[3]), "value"),
    ],
)
def test_what_is_no_message_is_refused_by_its_kind_of_mistake(data: bytes, fault: str) -> None:
    with pytest.raises(GroupMessageError) as raised:
        decode(data)
    assert raised.value.fault == fault
    assert "hint:" in str(raised.value) and len(str(raised.value)) < 800


@given(st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["v", "message", "kind", "request", "running", "pieces", "links"]), inner, max_size=4),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_nothing_but_a_refusal_comes_of_nonsense(data: bytes) -> None:
    with pytest.raises(GroupMessageError):
        decode(data)
