"""What the processes of a group tell each other: frozen carriers, their JSON, and what is wrong in a message.

Three kinds of processes speak. The driver has the requests, workers run them, and the coordinator decides which idle
worker helps which request. What workers tell the coordinator is their whole state each time, so nothing has to be
remembered, and a message that is lost costs nothing but time. What the driver and a worker have told each other may be
lost as well: the driver asks, and compares what the worker runs with what it was given.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_specrollout.errors import SpecRolloutError

VERSION = 4
MOST_BYTES = 1 << 26
"""Of one message: a prompt of a million tokens, and some."""
LIMIT = 1 << 31
"""Whole numbers are below it, and none is negative."""
_MOST_NAME = 256  # characters


class GroupMessageError(SpecRolloutError):
    """A message cannot be used.

    Args:
        fault: the kind of mistake, one word; there are few of them.
    """

    def __init__(self, fault: str, cause: str) -> None:
        self.fault = fault
        super().__init__(cause, "run the same version of vllm-specrollout in all processes, and nothing else there")


# --- driver and workers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """Driver to worker, now and then while a batch runs: say what you run. Nobody is to speak while nobody listens."""

    # of the calls so far; what was sent before this one has come before it, or is lost
    number: int
    # whether the drafter on its cores can draft now: it may be loading, or be dead
    has_drafter: bool = False


@dataclass(frozen=True, slots=True)
class Here:
    """Worker to driver, at its start and to each call."""

    # requests that it runs at once, at most
    places: int
    # of the call that it answers; 0: of none
    number: int = 0
    # the requests that it runs
    running: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """Driver to worker: generate the answer, from where it stands."""

    request: str
    # [P] token ids
    prompt: tuple[int, ...]
    # arguments of vLLM's `SamplingParams`, of the whole answer
    params: Mapping[str, Any]
    # [tokens so far] token ids
    answer: tuple[int, ...] = ()
    # it runs elsewhere as well
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """To a worker: abort the request; the answer is known, or nobody wants it."""

    request: str


@dataclass(frozen=True, slots=True)
class Want:
    """Worker to driver: it was told to race for this request, and needs it."""

    request: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step added to one answer."""

    request: str
    # tokens of the answer before these
    start: int
    # [n] token ids
    tokens: tuple[int, ...]
    # [n] of these tokens, natural logarithm; empty where none were asked for
    logprobs: tuple[float, ...] = ()
    # vLLM's reason if it is complete, or `error`
    finish: str = ""
    # the stop token or string, or what the error was
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """A worker's drafter that drafts for another one."""

    # the name of the worker that it belongs to
    drafter: str
    requests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """Worker to driver, after each step."""

    pieces: tuple[Piece, ...]
    # its drafting method, and the drafters of others that draft for it, as in its reports
    method: str = ""
    links: tuple[Link, ...] = ()


# --- workers and coordinator ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Running:
    """A request, as one worker has it."""

    request: str
    is_copy: bool = False
    # drafted tokens that the target got to, and those of them that it sampled itself
    tried: int = 0
    matched: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Worker to coordinator: all that it does now."""

    # its drafting method; empty: all that its engine has
    method: str = ""
    running: tuple[Running, ...] = ()
    # requests that it completed since its last report
    finished: tuple[str, ...] = ()
    # where its own drafter listens; empty: it has none that can draft now
    drafter: str = ""
    # what drafts there: two of one model draft the same
    drafter_model: str = ""
    # drafters of others that draft for it
    links: tuple[Link, ...] = ()
    # where it runs, as `cpu:0`; empty: it has these to itself
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Race:
    """Coordinator to worker: run this request as well, with this drafting method."""

    request: str
    method: str


@dataclass(frozen=True, slots=True)
class Attach:
    """Coordinator to worker: have another worker's drafter draft for these requests, and for none but these."""

    drafter: str
    address: str
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Detach:
    """Coordinator to worker: go on without this drafter."""

    drafter: str


Command = Race | Attach | Detach
Message = Call | Here | Run | Cancel | Want | Progress | Report | Race | Attach | Detach
_KINDS: Mapping[str, type] = {kind.__name__.lower(): kind for kind in typing.get_args(Message)}


# --- JSON -------------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """As JSON: `{"v": 1, "kind": "cancel", "request": "7"}`."""
    body = {"v": VERSION, "kind": type(message).__name__.lower(), **dataclasses.asdict(message)}
    return json.dumps(body, separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """
    Raises:
        GroupMessageError: it is no message, of another version, or has a field that is missing, unknown or wrong.
    """
    if len(data) > MOST_BYTES:
        raise GroupMessageError("size", f"a message of {len(data)} bytes, above {MOST_BYTES}")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise GroupMessageError("text", "a message is no JSON") from None
    if not isinstance(body, dict):
        raise GroupMessageError("text", "a message is no JSON object")
    version, kind = body.pop("v", None), body.pop("kind", None)
    if version != VERSION:
        raise GroupMessageError("version", f"a message of version {version!r}, and this is version {VERSION}")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise GroupMessageError("kind", f"a message of an unknown kind, {str(kind)[:40]!r}")
    return _made(_KINDS[kind], body)


def _made(kind: type, body: Any) -> Any:
    name = kind.__name__.lower()
    if not isinstance(body, dict):
        raise GroupMessageError("field", f"`{name}` is no object")
    hints = _hints(kind)
    needed = {one.name for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING}
    if not needed <= body.keys() <= hints.keys():
        raise GroupMessageError(
            "field", f"`{name}` has the fields {sorted(map(str, body))[:12]}, and needs {sorted(hints)}"
        )
    return kind(**{key: _value(f"{name}.{key}", value, hints[key]) for key, value in body.items()})


def _value(name: str, value: Any, hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin is tuple:
        if isinstance(value, list):
            return tuple(_value(name, one, typing.get_args(hint)[0]) for one in value)
    elif origin is not None:
        if isinstance(value, dict):
            return types.MappingProxyType(value)
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _made(hint, value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LIMIT:
            return value
    elif isinstance(value, hint) and not (hint is str and len(value) > _MOST_NAME and not name.endswith(".reason")):
        return value
    raise GroupMessageError("value", f"`{name}` is {str(value)[:80]!r}, which it cannot be")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
