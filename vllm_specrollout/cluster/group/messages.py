"""Messages between the processes of a group: frozen carriers, as lines of JSON with their types and ranges.

Three kinds of processes speak. The driver has the requests, workers run them, and the coordinator decides which idle
worker helps which request. What workers tell the coordinator is their whole state each time, so nothing has to be
remembered, and a message that is lost costs nothing but time. What the driver and a worker have told each other may be
lost as well: the driver asks, and compares what the worker runs with what it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from vllm_specrollout.errors import SpecRolloutError

VERSION = 5
MOST_BYTES = 1 << 26
"""Of one message: a prompt of a million tokens, and some."""
LIMIT = 1 << 31
"""Whole numbers are below it, and none is negative."""
_MOST_NAME = 256  # characters

Name = Annotated[str, msgspec.Meta(max_length=_MOST_NAME)]
Whole = Annotated[int, msgspec.Meta(ge=0, lt=LIMIT)]


class GroupMessageError(SpecRolloutError):
    """A message cannot be used.

    Args:
        fault: the kind of mistake, one word; there are few of them.
    """

    def __init__(self, fault: str, cause: str) -> None:
        self.fault = fault
        super().__init__(cause, "run the same version of vllm-specrollout in all processes, and nothing else there")


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a message is made of."""


class _Said(_Part, frozen=True, tag_field="kind", tag=str.lower):
    """A message; its kind is its class's name in small letters."""


# --- driver and workers -----------------------------------------------------------------------------------------------


class Call(_Said, frozen=True):
    """Driver to worker, now and then while a batch runs: say what you run. Nobody is to speak while nobody listens."""

    # of the calls so far; what was sent before this one has come before it, or is lost
    number: Whole
    # whether the drafter on its cores can draft now: it may be loading, or be dead
    has_drafter: bool = False


class Here(_Said, frozen=True):
    """Worker to driver, at its start and to each call."""

    # requests that it runs at once, at most
    places: Whole
    # of the call that it answers; 0: of none
    number: Whole = 0
    # the requests that it runs
    running: tuple[Name, ...] = ()


class Run(_Said, frozen=True):
    """Driver to worker: generate the answer, from where it stands."""

    request: Name
    # [P] token ids
    prompt: tuple[Whole, ...]
    # arguments of vLLM's `SamplingParams`, of the whole answer
    params: Mapping[str, Any]
    # [tokens so far] token ids
    answer: tuple[Whole, ...] = ()
    # it runs elsewhere as well
    is_copy: bool = False


class Cancel(_Said, frozen=True):
    """To a worker: abort the request; the answer is known, or nobody wants it."""

    request: Name


class Want(_Said, frozen=True):
    """Worker to driver: it was told to race for this request, and needs it."""

    request: Name


class Piece(_Part, frozen=True):
    """What a step added to one answer."""

    request: Name
    # tokens of the answer before these
    start: Whole
    # [n] token ids
    tokens: tuple[Whole, ...]
    # [n] of these tokens, natural logarithm; empty where none were asked for
    logprobs: tuple[float, ...] = ()
    # vLLM's reason if it is complete, or `error`
    finish: Name = ""
    # the stop token or string, or what the error was
    reason: str = ""


class Link(_Part, frozen=True):
    """A worker's drafter that drafts for another one."""

    # the name of the worker that it belongs to
    drafter: Name
    requests: tuple[Name, ...] = ()


class Progress(_Said, frozen=True):
    """Worker to driver, after each step."""

    pieces: tuple[Piece, ...]
    # its drafting method, and the drafters of others that draft for it, as in its reports
    method: Name = ""
    links: tuple[Link, ...] = ()


# --- workers and coordinator ------------------------------------------------------------------------------------------


class Running(_Part, frozen=True):
    """A request, as one worker has it."""

    request: Name
    is_copy: bool = False
    # drafted tokens that the target got to, and those of them that it sampled itself
    tried: Whole = 0
    matched: Whole = 0


class Report(_Said, frozen=True):
    """Worker to coordinator: all that it does now."""

    # its drafting method; empty: all that its engine has
    method: Name = ""
    running: tuple[Running, ...] = ()
    # requests that it completed since its last report
    finished: tuple[Name, ...] = ()
    # where its own drafter listens; empty: it has none that can draft now
    drafter: Name = ""
    # what drafts there: two of one model draft the same
    drafter_model: Name = ""
    # drafters of others that draft for it
    links: tuple[Link, ...] = ()
    # where it runs, as `cpu:0`; empty: it has these to itself
    devices: tuple[Name, ...] = ()


class Race(_Said, frozen=True):
    """Coordinator to worker: run this request as well, with this drafting method."""

    request: Name
    method: Name


class Attach(_Said, frozen=True):
    """Coordinator to worker: have another worker's drafter draft for these requests, and for none but these."""

    drafter: Name
    address: Name
    requests: tuple[Name, ...]


class Detach(_Said, frozen=True):
    """Coordinator to worker: go on without this drafter."""

    drafter: Name


Command = Race | Attach | Detach
Message = Call | Here | Run | Cancel | Want | Progress | Report | Race | Attach | Detach

# --- JSON -------------------------------------------------------------------------------------------------------------


class _Envelope(_Part, frozen=True):
    v: int
    message: Message


class _Version(msgspec.Struct, frozen=True):
    v: int


_version_of = msgspec.json.Decoder(_Version).decode
_opened = msgspec.json.Decoder(_Envelope).decode


def encode(message: Message) -> bytes:
    """As JSON: `{"v": 5, "message": {"kind": "cancel", "request": "7"}}`."""
    return msgspec.json.encode(_Envelope(VERSION, message))


def decode(data: bytes) -> Message:
    """
    Raises:
        GroupMessageError: it is no message, of another version, or has a field that is missing, unknown or wrong.
    """
    if len(data) > MOST_BYTES:
        raise GroupMessageError("size", f"a message of {len(data)} bytes, above {MOST_BYTES}")
    try:
        if (version := _version_of(data).v) == VERSION:
            return _opened(data).message
    except msgspec.ValidationError as error:
        raise GroupMessageError("value", f"a message cannot be used: {error!s:.200}") from None
    except (ValueError, RecursionError):
        raise GroupMessageError("text", "a message is no JSON") from None
    raise GroupMessageError("version", f"a message of version {version}, and this is version {VERSION}")
