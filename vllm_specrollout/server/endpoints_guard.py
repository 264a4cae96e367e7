"""What every route of ours does around its own work: the server's key, a body within limits, errors in one form.

FastAPI reads a body whole, parses it on the event loop and lists all its errors before it looks at anything else, and
vLLM's middleware asks for the key under its own prefixes only. So FastAPI describes our routes, and this runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers

from vllm_specrollout.errors import ForbiddenError, SpecRolloutError, UnsupportedError
from vllm_specrollout.reports import EpochError, WeightsError
from vllm_specrollout.server.endpoints_body import BodyError, read_body


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


def guarded_route(may_pass: Callable[[Headers], bool], hints: Mapping[str, str], max_bytes: int) -> type[APIRoute]:
    """A route class. An endpoint takes `request`, and a model as `body` if it has one; it returns plain JSON types.

    Args:
        may_pass: whether a request with these headers has the server's key.
        hints: field of a body -> what to give; "" for the body itself, "too large" for one beyond `max_bytes`.
        max_bytes: of a body.
    """

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            endpoint, model = self.endpoint, get_type_hints(self.endpoint).get("body")

            async def guarded(request: Request) -> Response:
                if not may_pass(request.headers):
                    return JSONResponse({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
                try:
                    given = {} if model is None else {"body": await read_body(request, model, max_bytes)}
                    return JSONResponse(await endpoint(request=request, **given))
                except BodyError as error:
                    hint = hints.get(error.field, hints[""])
                    return answer(error.status, f"{error.cause}\n\nhint: {hint}", error.param)
                except SpecRolloutError as error:
                    return answer(_status(error), str(error))

            return guarded

    return GuardedRoute


def _status(error: SpecRolloutError) -> HTTPStatus:
    if isinstance(error, ForbiddenError):
        return HTTPStatus.FORBIDDEN
    is_conflict = isinstance(error, (EpochError, UnsupportedError, WeightsError))
    return HTTPStatus.CONFLICT if is_conflict else HTTPStatus.UNPROCESSABLE_ENTITY


def answer(status: HTTPStatus, message: str, param: str | None = None) -> JSONResponse:
    """An error in the shape of vLLM's own."""
    # a lone surrogate cannot be sent; what a client sent may hold one
    plain = message.encode("utf-8", "backslashreplace").decode("utf-8")
    info = {"message": plain, "type": status.phrase, "param": param, "code": status.value}
    return JSONResponse({"error": info}, status)
