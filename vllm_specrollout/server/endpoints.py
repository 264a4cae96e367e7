"""The entry point `vllm.endpoint_plugins: spec_rollout`: rewards, epochs, history and drafters over HTTP.

What belongs here: the routes, what they take, and their one form of error. What is done with it is in `reports.py`.
vLLM loads this only if `VLLM_PLUGINS` names it. FastAPI describes the routes alone: it would read a body whole before
it looks at the key, and vLLM's middleware asks for the key under its own prefixes only.

A server streams to all its clients from one event loop. So a body is decoded on a thread of its own, and no more of it
than its first mistake.
"""

from __future__ import annotations

import asyncio
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from msgspec import Meta, Struct, defstruct
from starlette.datastructures import Headers, State
from starlette.requests import ClientDisconnect

from vllm_specrollout.config import envs
from vllm_specrollout.config.checks import MOST_ID
from vllm_specrollout.errors import ForbiddenError, SpecRolloutError, UnsupportedError, named
from vllm_specrollout.server import reports
from vllm_specrollout.server.asking import (
    Check,
    Conversation,
    aask,
    check_has_model,
    check_is_on,
    check_keeps_history,
    recording,
)
from vllm_specrollout.server.reports import MAX_EPOCH, MAX_INDEX, MAX_REWARDS
from vllm_specrollout.server.settings import readable_errors

PREFIX = "/spec_rollout"
MAX_PARTS = MAX_REWARDS + 1024
"""Objects and lists that a body may open: more than any report has."""
_STATE = "spec_rollout_engine"
T = TypeVar("T")

# one body at a time, so that several together take no more memory than one
_threads = ThreadPoolExecutor(1, "specrollout-http")

# --- what the routes take --------------------------------------------------------------------------------------------

# a whole number: to JSON, and so to a schema, 2.0 is one
_Index = Annotated[float, Meta(ge=0, le=MAX_INDEX, multiple_of=1)] | None
_Epoch = Annotated[float, Meta(ge=0, le=MAX_EPOCH, multiple_of=1)] | None


class SpecRolloutReward(Struct, forbid_unknown_fields=True, gc=False):
    """What one answer was worth."""

    request_id: Annotated[str, Meta(min_length=1, max_length=MOST_ID, description="The `id` of the server's answer.")]
    reward: float
    index: Annotated[_Index, Meta(description="The choice's `index`, if there are several.")] = None

    def __post_init__(self) -> None:
        # a decoder in C lets no other thread run, but where it calls Python: here, once for each of thousands
        self.index = None if self.index is None else int(self.index)


class SpecRolloutRewards(Struct, forbid_unknown_fields=True):
    rewards: Annotated[list[SpecRolloutReward], Meta(max_length=MAX_REWARDS)]


_EPOCH_SAYS = (
    "Not below the present one, and not far ahead of it. The present one begins nothing, so a request that names its "
    "epoch may be sent twice. null: the next."
)


class SpecRolloutNextEpoch(Struct, forbid_unknown_fields=True):
    epoch: Annotated[_Epoch, Meta(description=_EPOCH_SAYS)] = None


_PATH_SAYS = (
    f"A folder or safetensors file below the folder that {envs.DRAFTERS} names: absolute, or from there, as the engine "
    "sees it."
)


class SpecRolloutDrafterPath(Struct, forbid_unknown_fields=True):
    path: Annotated[str, Meta(min_length=1, max_length=4096, description=_PATH_SAYS)]


HINTS = {
    "too large": "split the rewards over several requests, or raise " + envs.MAX_BODY_MIB,
    "": "send a JSON object with `Content-Type: application/json`; /openapi.json says which keys there are",
    "rewards": f'give a list of at most {MAX_REWARDS}, like [{{"request_id": "cmpl-1", "reward": 1.0}}]',
    "request_id": f"give the id that the server returned, of 1 to {MOST_ID} characters",
    "reward": "give a finite number; leave answers without a reward out",
    "index": "give the index of the choice, from 0, or leave it out when there is one choice",
    "path": "give the path of a head's folder, or of its safetensors file, below the folder of " + envs.DRAFTERS,
    "epoch": "give a whole number from 0, or null for the next epoch",
    "engine": "give the number of a data-parallel engine, from 0",
}


class BodyError(Exception):
    """A body that cannot be used."""

    def __init__(self, status: HTTPStatus, cause: str, hint: str = "", name: str | None = None) -> None:
        """Args:
        hint: which of HINTS goes with it.
        name: the place in the body.
        """
        super().__init__(cause)
        self.status, self.cause, self.hint, self.name = status, cause, HINTS.get(hint, HINTS[""]), name


async def read_body(request: Request, kind: type[T], max_bytes: int) -> T:
    """The request's body.

    Raises:
        BodyError: it is too large, or not of that kind.
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
    if not body:
        raise BodyError(HTTPStatus.UNPROCESSABLE_ENTITY, "the body is missing")
    if not re.match(r"application/(.+\+)?json\s*(;|$)", request.headers.get("content-type", "").strip(), re.IGNORECASE):
        raise BodyError(HTTPStatus.UNPROCESSABLE_ENTITY, "the body does not say that it is JSON")
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: decode(body, kind))


def decode(body: bytes | bytearray, kind: type[T]) -> T:
    """Raises:
    BodyError: it is not of that kind; the first mistake is told.
    """
    # what is too long a list would be read to its end first
    if (count := body.count(b"{") + body.count(b"[")) > MAX_PARTS:
        cause = f"the body opens {count} objects and lists; the limit is {MAX_PARTS}"
        raise BodyError(HTTPStatus.UNPROCESSABLE_ENTITY, cause, "rewards")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        at = re.search(r"\(byte (\d+)\)", str(error))
        # what Python's own `json` writes for these numbers is no JSON
        if at and re.match(rb"N?an|Inf", body[int(at[1]) : int(at[1]) + 3], re.IGNORECASE):
            cause = f"the body holds NaN or infinity, at byte {at[1]}"
            raise BodyError(HTTPStatus.UNPROCESSABLE_ENTITY, cause, "reward") from None
        said = str(error).removeprefix("JSON is malformed: ")
        raise BodyError(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {said}") from None


def _check_size(num_bytes: int, most: int) -> None:
    if num_bytes > most:
        cause = f"the body has {num_bytes} bytes or more; the limit is {most}"
        raise BodyError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, cause, "too large")


def _explained(error: str) -> BodyError:
    """msgspec's error in our words: "Expected `str`, got `int` - at `$.rewards[3].request_id`"."""
    said, _, path = error.partition(" - at `$")
    where = path.rstrip("`").lstrip(".")
    key = re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", said, re.DOTALL)
    name = f"{where}.{named(key[2])}".lstrip(".") if key else where
    if key and key[1] == "contains unknown":
        # the hint is that of the list around it
        return BodyError(HTTPStatus.UNPROCESSABLE_ENTITY, f"unknown key `{name}`", where.partition("[")[0], name)
    cause = f"`{name}` is missing" if key else f"`{name or 'body'}` cannot be used: {said[:1].lower()}{said[1:]}"
    return BodyError(HTTPStatus.UNPROCESSABLE_ENTITY, cause, name.rpartition(".")[2].partition("[")[0], name or None)


# --- what they answer ------------------------------------------------------------------------------------------------


_Reports = list[dict[str, Any]]
RewardCounts = defstruct("SpecRolloutRewardCounts", [("matched", int), ("repeated", int), ("unknown", int)])
EpochBegun = defstruct("SpecRolloutEpoch", [("epoch", int)])
# how often the drafter's weights were swapped since the engine began
DrafterVersion = defstruct("SpecRolloutDrafterVersion", [("version", int)])
# counts, bytes and hits: of each engine, and their sums with the share of lookups that drafted, `hit_rate`
History = defstruct("SpecRolloutHistory", [("total", dict[str, Any]), ("engines", _Reports)])
# of each engine, how its drafters and its budget are: state, failures, and when what failed is tried again
Drafters = defstruct("SpecRolloutDrafters", [("engines", _Reports)])
# as vLLM's own errors; its routes answer a missing or a wrong key with a text alone
ErrorInfo = defstruct("ErrorInfo", [("message", str), ("type", str), ("param", str | None), ("code", int)])
ErrorResponse = defstruct("SpecRolloutErrorResponse", [("error", ErrorInfo)])
Unauthorized = defstruct("SpecRolloutUnauthorized", [("error", str)])


def answer(status: HTTPStatus, message: str, param: str | None = None) -> JSONResponse:
    """An error in the shape of vLLM's own."""
    # a lone surrogate cannot be sent; what a client sent may hold one
    plain = message.encode("utf-8", "backslashreplace").decode("utf-8")
    info = {"message": plain, "type": status.phrase, "param": param, "code": status.value}
    return JSONResponse({"error": info}, status)


def _status(error: SpecRolloutError) -> HTTPStatus:
    if isinstance(error, ForbiddenError):
        return HTTPStatus.FORBIDDEN
    is_conflict = isinstance(error, (reports.EpochError, UnsupportedError, reports.WeightsError))
    return HTTPStatus.CONFLICT if is_conflict else HTTPStatus.UNPROCESSABLE_ENTITY


# --- what they do ----------------------------------------------------------------------------------------------------


async def report_rewards(request: Request, body: SpecRolloutRewards) -> Any:
    """Tell the engine what answers were worth. Late, repeated and unknown ids are counted, not refused."""
    return await _ask(request, reports.reporting(body.rewards))


async def begin_epoch(request: Request, body: SpecRolloutNextEpoch) -> Any:
    """Begin the next epoch, or the one named: all problems will be asked again."""
    return {"epoch": await _ask(request, reports.beginning(None if body.epoch is None else int(body.epoch)))}


async def load_drafter(request: Request, body: SpecRolloutDrafterPath) -> Any:
    """Give the model that drafts other weights of the same shape. Requests go on running."""
    if (below := envs.drafters_dir()) is None:
        raise ForbiddenError(
            "this server takes no drafters over HTTP",
            f"start it with {envs.DRAFTERS}=DIR; whatever lies below DIR may then be loaded",
        )
    return {"version": await _ask(request, reports.loading(body.path, below), check_has_model)}


async def read_history(request: Request) -> Any:
    """What the history holds and how often it drafted."""
    return await _ask(request, reports.reading())


async def read_drafters(request: Request) -> Any:
    """Which drafters work, which are on probation and which are given up."""
    return await _ask(request, reports.reading_drafters(), check_is_on)


async def read_rollout(request: Request) -> Any:
    """What the engine has recorded: a file for `specrollout report`. Of several engines, `engine` says which."""
    engine = _engine(request)
    number = request.query_params.get("engine", "0")
    if not re.fullmatch("[0-9]{1,4}", number):
        raise BodyError(HTTPStatus.UNPROCESSABLE_ENTITY, f"`engine` is {named(number)}", "engine", "engine")
    path = recording(engine, int(number))
    # as much as there is now: it may grow while it is sent
    size = path.stat().st_size
    headers = {"content-length": str(size), "content-disposition": f"attachment; filename*=utf-8''{quote(path.name)}"}
    return StreamingResponse(_beginning(path, size), media_type="application/octet-stream", headers=headers)


def _beginning(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while size and (part := file.read(min(size, envs.MIB))):
            size -= len(part)
            yield part


def _engine(request: Request) -> Any:
    engine = getattr(request.app.state, _STATE, None)
    if engine is None:
        raise UnsupportedError("this server has no engine", "send the request to a server that generates")
    return engine


async def _ask(request: Request, conversation: Conversation[Any], check: Check = check_keeps_history) -> Any:
    return await aask(_engine(request), conversation, check)


_ROUTES = (
    ("POST", "/rewards", report_rewards, SpecRolloutRewards, RewardCounts),
    ("POST", "/epoch", begin_epoch, SpecRolloutNextEpoch, EpochBegun),
    ("POST", "/drafter", load_drafter, SpecRolloutDrafterPath, DrafterVersion),
    ("GET", "/history", read_history, None, History),
    ("GET", "/drafters", read_drafters, None, Drafters),
    ("GET", "/rollout", read_rollout, None, None),
)
_FILE = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
_REFUSALS = {
    400: "The body is not JSON.",
    401: "The server has a key, and the request has not.",
    403: f"No folder is named in {envs.DRAFTERS}, or the path leads out of it.",
    409: "No history is kept, the epoch is over or far off, no model drafts, or weights are of no use.",
    413: "The body is larger than the server takes: 1 MiB, or as many as SPECROLLOUT_MAX_BODY_MIB says.",
    422: "The body holds what cannot be used.",
}


def make_router(may_pass: Callable[[Headers], bool] | None, max_bytes: int = envs.MIB) -> APIRouter:
    """The routes.

    Args:
        may_pass: whether a request with these headers has the server's key; None: the server has none.
        max_bytes: of a request's body.
    """
    # checked in each route; the dependency only says so in the server's description
    described = [Depends(HTTPBearer(auto_error=False, scheme_name="api_key"))] if may_pass else []
    router = APIRouter(prefix=PREFIX, tags=["spec rollout"], dependencies=described)
    for method, path, work, kind, gives in _ROUTES:
        left_out = {400, 403, 413, 422} if kind is None else {403} if work is not load_drafter else set()
        told: dict[int | str, dict[str, Any]] = {200: _FILE if gives is None else _content(gives)}
        for status in sorted(_REFUSALS.keys() - left_out):
            shape = Unauthorized if status == 401 else ErrorResponse
            told[status] = {"description": _REFUSALS[status], **_content(shape)}
        router.add_api_route(
            path,
            _guarded(work, kind, may_pass or (lambda headers: True), max_bytes),
            methods=[method],
            name=work.__name__,
            description=work.__doc__,
            response_model=None,
            responses=told,
            openapi_extra=None if kind is None else {"requestBody": {"required": True, **_content(kind)}},
        )
    return router


def _guarded(work: Any, kind: Any, may_pass: Callable[[Headers], bool], max_bytes: int) -> Callable[..., Any]:
    """A route around its work: the key before all else, a body within limits, errors in one form."""

    async def route(request: Request) -> Response:
        if not may_pass(request.headers):
            return JSONResponse({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
        try:
            given = () if kind is None else (await read_body(request, kind, max_bytes),)
            found = await work(request, *given)
            return found if isinstance(found, Response) else JSONResponse(found)
        except BodyError as error:
            return answer(error.status, f"{error.cause}\n\nhint: {error.hint}", error.name)
        except SpecRolloutError as error:
            return answer(_status(error), str(error))

    return route


def _content(kind: type) -> dict[str, Any]:
    """What an OpenAPI document says of it; in one piece, as its parts have no other users."""
    (whole_one,), parts = msgspec.json.schema_components([kind], ref_template="{name}")

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(one) for one in node]
        if not isinstance(node, dict):
            return node
        return inlined(parts[node["$ref"]]) if "$ref" in node else {key: inlined(one) for key, one in node.items()}

    return {"content": {"application/json": {"schema": inlined(whole_one)}}}


# --- what vLLM calls -------------------------------------------------------------------------------------------------


def _key_check(args: Any) -> Callable[[Headers], bool] | None:
    """vLLM's own check of its key (`--api-key`, VLLM_API_KEY), which its middleware makes for other prefixes only."""
    import vllm.envs
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    keys = [key for key in (getattr(args, "api_key", None) or [vllm.envs.VLLM_API_KEY]) if key]
    return AuthenticationMiddleware(FastAPI(), keys).verify_token if keys else None


class SpecRolloutEndpoints:
    """What vLLM calls: once to add the routes, once when the engine is there."""

    name = "spec_rollout"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        with readable_errors():
            max_bytes = envs.max_body_bytes()
            envs.drafters_dir()
        app.include_router(make_router(_key_check(getattr(app.state, "args", None)), max_bytes))

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        setattr(state, _STATE, engine_client)
