"""What every route of ours does around its own work: the server's key, a limit on the body, errors in one form.

FastAPI reads a body whole before it looks at anything else, and vLLM's middleware asks for the key under its own
prefixes only. So both are done here, around FastAPI's handler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message

from vllm_specrollout.errors import SpecRolloutError, UnsupportedError
from vllm_specrollout.reports import EpochError, WeightsError

MAX_BODY_BYTES = 8 << 20
MAX_SHOWN = 80
"""Characters of a wrong value that its error repeats."""


class ErrorInfo(BaseModel):
    message: str
    """Cause, value and limit, an empty line, and `hint:` with the way out."""
    type: str
    param: str | None = None
    code: int


class SpecRolloutErrorResponse(BaseModel):
    """The shape of vLLM's own errors."""

    error: ErrorInfo


class SpecRolloutUnauthorized(BaseModel):
    """The answer of vLLM's own routes to a missing or a wrong key."""

    error: str


class BodyTooLarge(HTTPException):
    """An `HTTPException`, since FastAPI turns any other that comes up while it reads a body into one of its own."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body has {num_bytes} bytes or more; the limit is {MAX_BODY_BYTES}\n\n"
            "hint: split the rewards over several requests",
        )


def guarded_route(may_pass: Callable[[Headers], bool], hints: Mapping[str, str]) -> type[APIRoute]:
    """A route class.

    Args:
        may_pass: whether a request with these headers has the server's key.
        hints: field of a body -> what to give; "" for the body itself.
    """

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                if not may_pass(request.headers):
                    return JSONResponse({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
                try:
                    return await handle(_limited(request))
                except RequestValidationError as error:
                    return _explain(error.errors(), hints)
                except BodyTooLarge as error:
                    return answer(HTTPStatus(error.status_code), error.detail)
                except HTTPException:
                    return answer(HTTPStatus.BAD_REQUEST, f"the body cannot be read as JSON\n\nhint: {hints['']}")
                except SpecRolloutError as error:
                    is_conflict = isinstance(error, (EpochError, UnsupportedError, WeightsError))
                    return answer(HTTPStatus.CONFLICT if is_conflict else HTTPStatus.UNPROCESSABLE_ENTITY, str(error))

            return guarded

    return GuardedRoute


def answer(status: HTTPStatus, message: str, param: str | None = None) -> JSONResponse:
    """An error in the shape of vLLM's own."""
    # a lone surrogate cannot be sent; what a client sent may hold one
    plain = message.encode("utf-8", "backslashreplace").decode("utf-8")
    info = {"message": plain, "type": status.phrase, "param": param, "code": status.value}
    return JSONResponse({"error": info}, status)


def _limited(request: Request) -> Request:
    """The same request, whose body ends in 413 as soon as it is known to be too large."""
    announced = request.headers.get("content-length", "")
    _check_size(int(announced[:19]) if announced.isdecimal() else 0)
    received = 0

    async def receive() -> Message:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        _check_size(received)
        return message

    return Request(request.scope, receive)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise BodyTooLarge(num_bytes)


def _explain(errors: Sequence[Mapping[str, Any]], hints: Mapping[str, str]) -> JSONResponse:
    """The first of the errors FastAPI found, and how many there are."""
    first = errors[0]
    # ("body", "rewards", 3, "reward") -> rewards[3].reward
    path = [part for part in first["loc"][1:] if part != "body"]
    if first["type"] == "json_invalid":
        return answer(
            HTTPStatus.BAD_REQUEST,
            f"the body is not JSON: {first['ctx']['error']} at character {path[0]}\n\nhint: {hints['']}",
        )
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")[:MAX_SHOWN]
    fields = [part for part in path if isinstance(part, str)]
    field = fields[-1] if fields else ""
    if first["type"] == "extra_forbidden":
        cause, field = f"unknown key `{name}`", fields[-2] if len(fields) > 1 else ""
    elif first["type"] == "missing":
        cause = f"`{name}` is missing" if name else "the body is missing"
    else:
        said = first["msg"][:1].lower() + first["msg"][1:]
        cause = f"`{name or 'body'}` is {_shown(first.get('input'))}: {said}"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    message = f"{cause}{more}\n\nhint: {hints.get(field, hints[''])}"
    return answer(HTTPStatus.UNPROCESSABLE_ENTITY, message, name or None)


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple, dict)):
        return f"a {'dict' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, (str, bytes)):
        text = repr(value[: MAX_SHOWN + 1])
    elif isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    else:
        text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
