"""The entry point `vllm.endpoint_plugins: spec_rollout`: rewards, epochs, history and drafters over HTTP.

What belongs here: the routes and the shapes of what they take and return. What is done with it is in `reports.py`, and
what all routes share (key, limits, errors) in `endpoints_guard.py`. vLLM loads this only if `VLLM_PLUGINS` names it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NotRequired

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.security import HTTPBearer
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, WrapValidator
from starlette.datastructures import Headers, State
from typing_extensions import TypedDict

from vllm_specrollout import health, reports
from vllm_specrollout.asking import Check, Conversation, aask, check_has_model, check_is_on
from vllm_specrollout.config import envs
from vllm_specrollout.errors import ForbiddenError, UnsupportedError
from vllm_specrollout.server.command_line import readable_errors
from vllm_specrollout.server.endpoints_body import in_place
from vllm_specrollout.server.endpoints_guard import (
    SpecRolloutErrorResponse,
    SpecRolloutUnauthorized,
    guarded_route,
)

PREFIX = "/spec_rollout"
_STATE = "spec_rollout_engine"
_STRICT = ConfigDict(extra="forbid", strict=True)
# to JSON, and so to a schema's "integer", 2.0 is 2
_WHOLE = BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)
_Index = Annotated[int, Field(ge=0, le=reports.MAX_INDEX), _WHOLE]
_Epoch = Annotated[int, Field(ge=0, le=reports.MAX_EPOCH), _WHOLE]

HINTS = {
    "too large": "split the rewards over several requests, or raise " + envs.MAX_BODY_MIB,
    "": "send a JSON object with `Content-Type: application/json`; /openapi.json says which keys there are",
    "rewards": f'give a list of at most {reports.MAX_REWARDS}, like [{{"request_id": "cmpl-1", "reward": 1.0}}]',
    "request_id": f"give the id that the server returned, of 1 to {reports.MAX_ID_LENGTH} characters",
    "reward": "give a finite number; leave answers without a reward out",
    "index": "give the index of the choice, from 0, or leave it out when there is one choice",
    "path": "give the path of a head's folder, or of its safetensors file, below the folder of " + envs.DRAFTERS,
    "epoch": "give a whole number from 0, or null for the next epoch",
}


class SpecRolloutReward(TypedDict):
    """What one answer was worth."""

    # no model: a body holds thousands of them, and dicts of plain values are nothing to Python's garbage collector
    __pydantic_config__ = _STRICT  # type: ignore[misc]
    request_id: Annotated[
        str, Field(min_length=1, max_length=reports.MAX_ID_LENGTH, description="The `id` of the server's answer.")
    ]
    reward: Annotated[float, Field(allow_inf_nan=False)]
    index: NotRequired[Annotated[_Index | None, Field(description="The choice's `index`, if there are several.")]]


class SpecRolloutRewards(BaseModel):
    model_config = _STRICT
    # of a list with mistakes, the first is told
    rewards: Annotated[
        list[Annotated[SpecRolloutReward, WrapValidator(in_place)]],
        FailFast(),
        Field(max_length=reports.MAX_REWARDS),
    ]


class SpecRolloutRewardCounts(BaseModel):
    """How many rewards found their answer, took an earlier one's place, or found none."""

    matched: int
    repeated: int
    unknown: int


_EPOCH_SAYS = (
    "Not below the present one, and not far ahead of it. The present one begins nothing, so a request that names its "
    "epoch may be sent twice. null: the next."
)


class SpecRolloutNextEpoch(BaseModel):
    model_config = _STRICT
    epoch: Annotated[_Epoch | None, Field(description=_EPOCH_SAYS)] = None


class SpecRolloutEpoch(BaseModel):
    epoch: int


_PATH_SAYS = (
    f"A folder or safetensors file below the folder that {envs.DRAFTERS} names: absolute, or from there, as the engine "
    "sees it."
)


class SpecRolloutDrafterPath(BaseModel):
    model_config = _STRICT
    path: Annotated[str, Field(min_length=1, max_length=4096, description=_PATH_SAYS)]


class SpecRolloutDrafterVersion(BaseModel):
    """How often the drafter's weights were swapped since the engine began."""

    version: int


class SpecRolloutHistory(BaseModel):
    """Counts, bytes and hits: of each engine, and their sums with the share of lookups that drafted, `hit_rate`."""

    total: dict[str, Any]
    engines: list[dict[str, Any]]


class SpecRolloutDrafters(BaseModel):
    """Of each engine, how its drafters and its budget are: state, failures, and when what failed is tried again."""

    engines: list[dict[str, Any]]


_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": SpecRolloutErrorResponse, "description": "The body is not JSON."},
    403: {
        "model": SpecRolloutErrorResponse,
        "description": f"No folder is named in {envs.DRAFTERS}, or the path leads out of it.",
    },
    409: {
        "model": SpecRolloutErrorResponse,
        "description": "No history is kept, the epoch is over or far off, no model drafts, or weights are of no use.",
    },
    413: {
        "model": SpecRolloutErrorResponse,
        "description": "The body is larger than the server takes: 1 MiB, or as many as SPECROLLOUT_MAX_BODY_MIB says.",
    },
    422: {"model": SpecRolloutErrorResponse, "description": "The body holds what cannot be used."},
}
_KEY_REFUSAL: dict[int | str, dict[str, Any]] = {
    401: {"model": SpecRolloutUnauthorized, "description": "The server has a key, and the request has not."}
}


class _Rewards(Sequence[reports.Reward]):
    """The rewards of a body, made one by one when they are asked for."""

    def __init__(self, given: list[SpecRolloutReward]) -> None:
        self._given = given

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, at: Any) -> Any:
        found = self._given[at]
        return [reports.Reward(**one) for one in found] if isinstance(at, slice) else reports.Reward(**found)


async def report_rewards(body: SpecRolloutRewards, request: Request) -> Any:
    """Tell the engine what answers were worth. Late, repeated and unknown ids are counted, not refused."""
    return await _ask(request, reports.reporting(_Rewards(body.rewards)))


async def begin_epoch(body: SpecRolloutNextEpoch, request: Request) -> Any:
    """Begin the next epoch, or the one named: all problems will be asked again."""
    return {"epoch": await _ask(request, reports.beginning(body.epoch))}


async def load_drafter(body: SpecRolloutDrafterPath, request: Request) -> Any:
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
    return await _ask(request, health.reading(), check_is_on)


async def _ask(request: Request, conversation: Conversation[Any], check: Check | None = None) -> Any:
    engine = getattr(request.app.state, _STATE, None)
    if engine is None:
        raise UnsupportedError("this server has no engine", "send the request to a server that generates")
    return await aask(engine, conversation, check)


def make_router(may_pass: Callable[[Headers], bool] | None, max_bytes: int = envs.MIB) -> APIRouter:
    """The routes.

    Args:
        may_pass: whether a request with these headers has the server's key; None: the server has none.
        max_bytes: of a request's body.
    """
    route_class = guarded_route(may_pass or (lambda headers: True), HINTS, max_bytes)
    # checked by the route class; the dependency only says so in the server's description
    described = [Depends(HTTPBearer(auto_error=False, scheme_name="api_key"))] if may_pass else []
    router = APIRouter(prefix=PREFIX, tags=["spec rollout"], route_class=route_class, dependencies=described)
    with_path = _REFUSALS | _KEY_REFUSAL
    with_body = {status: told for status, told in with_path.items() if status != 403}
    without = {409: _REFUSALS[409]} | _KEY_REFUSAL
    add = router.add_api_route
    add("/rewards", report_rewards, methods=["POST"], response_model=SpecRolloutRewardCounts, responses=with_body)
    add("/epoch", begin_epoch, methods=["POST"], response_model=SpecRolloutEpoch, responses=with_body)
    add("/drafter", load_drafter, methods=["POST"], response_model=SpecRolloutDrafterVersion, responses=with_path)
    add("/history", read_history, methods=["GET"], response_model=SpecRolloutHistory, responses=without)
    add("/drafters", read_drafters, methods=["GET"], response_model=SpecRolloutDrafters, responses=without)
    return router


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
