"""Bodies posted to our routes, in the process of the server, and what its event loop does meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm_specrollout.config.envs import MAX_BODY_MIB as LIMIT

from .bodies import KINDS, VALID, body
from .memory import forget_peak, peak_mib, rss_mib

_TICK_S = 0.001
_CHUNK = 1 << 16
"""Bytes that a server hands over at once."""
_QUIET_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """One body, posted several times."""

    kind: str
    num_bytes: int
    # of the answer
    status: int
    # per time: milliseconds of the longest gap between two turns of the event loop, beyond what it slept
    blocked_ms: tuple[float, ...]
    # per time: until the answer was there
    took_ms: tuple[float, ...]
    # beyond what there was before the first one
    peak_mib: float


class _Engine:
    """What an engine is to the routes; it knows no request."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(additional_config={"spec_rollout": {"drafters": ["history"]}})

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        # its answer comes from another process, in a later turn of the loop
        await asyncio.sleep(0)
        return [{"matched": 0, "repeated": 0, "unknown": len(args[0]) if args else 0}]


def post_each(kind: str, num_bytes: int, limit_mib: int, times: int) -> Posted:
    """Post one kind of body, or nothing where `kind` is empty: what the host does to an idle loop."""
    os.environ[LIMIT] = str(limit_mib)
    return asyncio.run(_post_each(kind, num_bytes, times))


async def _post_each(kind: str, num_bytes: int, times: int) -> Posted:
    app = await _app()
    content = body(kind, num_bytes) if kind in KINDS else b""
    # what is made once, threads and the like, is no growth
    await _post(app, body(VALID, 1024))
    # as vLLM's server does when it has started: what all its imports made is not looked through again
    gc.collect()
    gc.freeze()
    blocked, took, status = list[float](), list[float](), 0
    forget_peak()
    before = rss_mib()
    for _ in range(times):
        ticks = _Ticks()
        await asyncio.sleep(_QUIET_S / 4)
        start = time.perf_counter()
        if content:
            status = await _post(app, content)
        else:
            await asyncio.sleep(_QUIET_S)
        took.append((time.perf_counter() - start) * 1e3)
        blocked.append(await ticks.end())
    return Posted(
        kind=kind,
        num_bytes=len(content),
        status=status,
        blocked_ms=tuple(blocked),
        took_ms=tuple(took),
        peak_mib=max(0.0, peak_mib() - before),
    )


async def _app() -> Any:
    """Wired as vLLM wires it."""
    from fastapi import FastAPI

    from vllm_specrollout.server.endpoints import SpecRolloutEndpoints

    app = FastAPI()
    app.state.args = Namespace(api_key=None)
    plugin = SpecRolloutEndpoints()
    plugin.attach_router(app)
    await plugin.init_state(_Engine(), app.state, app.state.args)
    return app


async def _post(app: Any, content: bytes) -> int:
    """The status that the app answers with."""
    parts = _parts(content)
    status = 0

    async def receive() -> dict[str, Any]:
        # a server has other things to do between two of them
        await asyncio.sleep(0)
        return next(parts, {"type": "http.disconnect"})

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    path = "/spec_rollout/rewards"
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode()}
    more = {"scheme": "http", "query_string": b"", "root_path": "", "client": None, "server": ("localhost", 80)}
    await app({**scope, **more, "headers": headers, "asgi": {"version": "3.0"}}, receive, send)
    return status


def _parts(content: bytes) -> Iterator[dict[str, Any]]:
    for at in range(0, max(len(content), 1), _CHUNK):
        is_last = at + _CHUNK >= len(content)
        yield {"type": "http.request", "body": content[at : at + _CHUNK], "more_body": not is_last}


class _Ticks:
    """Turns of the event loop, from here on."""

    def __init__(self) -> None:
        self._is_over = False
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> float:
        longest, last = 0.0, time.perf_counter()
        while not self._is_over:
            await asyncio.sleep(_TICK_S)
            now = time.perf_counter()
            longest, last = max(longest, now - last - _TICK_S), now
        return longest * 1e3

    async def end(self) -> float:
        """Milliseconds of the longest gap."""
        self._is_over = True
        return await self._task
