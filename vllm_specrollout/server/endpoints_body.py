"""The body of a request to our routes: read up to a limit, parsed on a thread of its own, refused with one error.

A server streams to all its clients from one event loop. So nothing here that takes time in proportion to a body runs on
it, and nothing takes memory in proportion to how wrong a body is: FastAPI would list every error of it first.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, KeysView
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, TypeVar, get_args

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from typing_extensions import is_typeddict

from vllm_specrollout.errors import named, shown
from vllm_specrollout.reports import MAX_REWARDS

MAX_PARTS = MAX_REWARDS + 1024
"""Objects and lists that a body may open: more than any report has. They take most of a parsed body's memory, 64 to 240
bytes each."""
_UNREADABLE = "the body cannot be read as JSON"

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")

# one body at a time, so that several together take no more memory than one
_threads = ThreadPoolExecutor(1, "specrollout-http")


class BodyError(Exception):
    """A body that cannot be used."""

    def __init__(self, status: HTTPStatus, cause: str, field: str = "", param: str | None = None) -> None:
        """Args:
        field: whose hint the answer gives; empty: that of the body.
        param: the place in the body.
        """
        super().__init__(cause)
        self.status, self.cause, self.field, self.param = status, cause, field, param


async def read_body(request: Request, model: type[Model], max_bytes: int) -> Model:
    """The request's body as a model.

    Raises:
        BodyError: it is too large, or no such model.
    """
    announced = request.headers.get("content-length", "")
    _check_size(int(announced[:19]) if announced.isdecimal() else 0, max_bytes)
    # one that grows: parts that are joined are there twice
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            _check_size(len(body), max_bytes)
    except ClientDisconnect:
        raise BodyError(HTTPStatus.BAD_REQUEST, "the client left before its body had come") from None
    if body and not _is_json(request.headers.get("content-type", "")):
        raise BodyError(HTTPStatus.UNPROCESSABLE_ENTITY, "the body does not say that it is JSON")
    # nobody holds the bytes but who reads them
    held = [body]
    del body
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: parse(held.pop(), model))


def parse(body: bytes | bytearray, model: type[Model]) -> Model:
    """A whole body as a model; no more than its first mistake is looked for.

    Raises:
        BodyError: it is no such model.
    """
    _check_parts(body)
    try:
        value = json.loads(body, object_hook=let_others_run) if body else None
    except json.JSONDecodeError as error:
        cause = f"the body is not JSON: {error.msg} at character {error.pos}"
        raise BodyError(HTTPStatus.BAD_REQUEST, cause) from None
    except (ValueError, RecursionError):
        # no text, a number of thousands of digits, or nested beyond what Python reads
        raise BodyError(HTTPStatus.BAD_REQUEST, _UNREADABLE) from None
    if value is None:
        raise BodyError(HTTPStatus.UNPROCESSABLE_ENTITY, "the body is missing")
    # what is made of it takes more memory still
    del body
    _check_keys(value, model)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _explained(error) from error


def let_others_run(value: T) -> T:
    """Called for every object: a parser written in C lets no other thread run, but where it calls Python."""
    return value


def in_place(value: Any, check: Callable[[Any], Any]) -> Any:
    """Checks a dict of a long list, and keeps it rather than a copy. Called for each, it lets others run as well."""
    found = check(value)
    if not isinstance(value, dict):
        return found
    value.update(found)
    return value


def _check_parts(body: bytes | bytearray) -> None:
    """Refuse what would take long to parse, before it is: Python's parser lets nothing else run meanwhile."""
    count, colons = body.count(b"{") + body.count(b"["), body.count(b":")
    if count > MAX_PARTS:
        cause = f"the body opens {count} objects and lists; the limit is {MAX_PARTS}"
        raise BodyError(HTTPStatus.UNPROCESSABLE_ENTITY, cause, "rewards")
    # ids may hold some as well
    if colons > (most := 8 * count + 16_384):
        cause = f"the body has {colons} colons; with so few objects in it, the limit is {most}"
        raise BodyError(HTTPStatus.UNPROCESSABLE_ENTITY, cause, "rewards")


def _check_size(num_bytes: int, most: int) -> None:
    if num_bytes > most:
        cause = f"the body has {num_bytes} bytes or more; the limit is {most}"
        raise BodyError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, cause, "too large")


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _check_keys(value: Any, model: type[BaseModel]) -> None:
    """Refuse the first unknown key: pydantic would make an error of each, of which there may be any number."""
    if not isinstance(value, dict):
        return
    _check_known(value, model.model_fields.keys(), "", "")
    for name, described in model.model_fields.items():
        # behind what is said of how it is checked
        kinds = (getattr(one, "__origin__", one) for one in get_args(described.annotation))
        inner = next((one for one in kinds if is_typeddict(one)), None)
        entries = value.get(name)
        if inner is not None and isinstance(entries, list) and len(entries) <= MAX_REWARDS:
            known = inner.__annotations__.keys()
            for i, entry in enumerate(entries):
                if isinstance(entry, dict) and not entry.keys() <= known:
                    _check_known(entry, known, f"{name}[{i}].", name)


def _check_known(value: dict[str, Any], known: KeysView[str], where: str, field: str) -> None:
    if not value.keys() <= known:
        name = where + named(next(key for key in value if key not in known))
        raise BodyError(HTTPStatus.UNPROCESSABLE_ENTITY, f"unknown key `{name}`", field, name)


def _explained(error: ValidationError) -> BodyError:
    """The first of pydantic's errors; the models see to it that there are few."""
    first = error.errors(include_url=False)[0]
    # ("rewards", 3, "reward") -> rewards[3].reward
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    field = next((part for part in reversed(first["loc"]) if isinstance(part, str)), "")
    if first["type"] == "missing":
        cause = f"`{name}` is missing"
    else:
        said = first["msg"][:1].lower() + first["msg"][1:]
        cause = f"`{name or 'body'}` is {_described(first['input'])}: {said}"
    return BodyError(HTTPStatus.UNPROCESSABLE_ENTITY, cause, field, name or None)


def _described(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return shown(value)
