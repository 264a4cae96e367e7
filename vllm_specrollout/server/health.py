"""How a running engine's drafters and budget are: asked, on probation, or given up.

What belongs here: the question, for engines that are called or awaited, and over HTTP; and what a person reads of it.
"""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from vllm_specrollout.errors import ConfigError
from vllm_specrollout.server.asking import Call, Conversation, aask, ask, check_is_on

ROUTE = "/spec_rollout/drafters"
_TIMEOUT_S = 10.0


def read_drafters(llm: Any) -> dict[str, Any]:
    """How drafters and budget are, in plain JSON types.

    Returns:
        "engines": of each engine its "drafters" by their names, and its "budget". Of each, its "state" (`alive`,
        `probation` or `given up`), how often it "failed" lately, the last "error", and the "steps" until it is tried
        again.

    Raises:
        ConfigError: `llm` is no `LLM` or `LLMEngine`.
        UnsupportedError: spec rollout is off.
    """
    return ask(llm, reading(), check_is_on)


async def aread_drafters(engine: Any) -> dict[str, Any]:
    """`read_drafters` for an `AsyncLLM`."""
    return await aask(engine, reading(), check_is_on)


def reading() -> Conversation[dict[str, Any]]:
    """Ask all workers; those that do not draft say nothing."""
    answers = yield Call("spec_rollout_health")
    return {"engines": [found for workers in answers for found in workers if found]}


def of_server(url: str, key: str = "") -> dict[str, Any]:
    """What a server says, as `read_drafters`.

    Args:
        url: such as `http://localhost:8000`.
        key: the server's, if it has one.

    Raises:
        ConfigError: it cannot be asked.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"`--server` is `{url}`, no address of a server", "give one like http://localhost:8000")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(url.rstrip("/") + ROUTE, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return dict(json.load(response))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigError(
            f"`{url}` does not say how its drafters are: {error}",
            "start the server with spec rollout, and with `VLLM_PLUGINS` naming `spec_rollout`; a key goes into"
            " VLLM_API_KEY",
        ) from None


def lines(report: dict[str, Any]) -> Sequence[tuple[str, str, bool]]:
    """Name, state in words, and whether it is a problem, of each part of each engine."""
    found = []
    for number, engine in enumerate(report["engines"]):
        where = f" of engine {number}" if len(report["engines"]) > 1 else ""
        parts = [*((f"drafter {name}", own) for name, own in engine["drafters"].items()), ("budget", engine["budget"])]
        for name, own in parts:
            said = {"alive": "works", "probation": f"is tried again in {own['steps']} steps"}.get(
                own["state"], own["state"]
            )
            failed = f"; failed {own['failed']} times, last: {own['error']}" if own["failed"] else ""
            found.append((name + where, said + failed, own["state"] != "alive"))
    return found
