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


def body(**changes: Any) -> bytes:
    return json.dumps({"v": VERSION, "kind": "race", "request": "r", "method": "m", **changes}).encode()


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"\xff", "text"),
        (b"[]", "text"),
        (b"[" * 100_000, "text"),
        (body(v=VERSION - 1), "version"),
        (body(kind="fly"), "kind"),
        (body(kind=["race"]), "kind"),
        (body(more=1), "field"),
        (body(kind="cancel"), "field"),
        (json.dumps({"v": VERSION, "kind": "race", "request": "r"}).encode(), "field"),
        (body(method=3), "value"),
        (body(method="m" * 300), "value"),
        (json.dumps({"v": VERSION, "kind": "here", "places": True}).encode(), "value"),
        (json.dumps({"v": VERSION, "kind": "here", "places": -1}).encode(), "value"),
        (json.dumps({"v": VERSION, "kind": "run", "request": "r", "prompt": [1, "2"], "params": {}}).encode(), "value"),
        (json.dumps({"v": VERSION, "kind": "run", "request": "r", "prompt": [1], "params": []}).encode(), "value"),
        (json.dumps({"v": VERSION, "kind": "progress", "pieces": [3]}).encode(), "field"),
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
        st.sampled_from(["v", "kind", "request", "running", "pieces", "links"]), inner, max_size=4),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_nothing_but_a_refusal_comes_of_nonsense(data: bytes) -> None:
    with pytest.raises(GroupMessageError):
        decode(data)
