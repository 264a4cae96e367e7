"""An app with our routes alone, before an engine that only remembers what it was told."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("vllm")

from fastapi import FastAPI
from fastapi.testclient import TestClient

JSON = {"content-type": "application/json"}
HISTORY = {"drafters": ["history", "ngram"]}
WITH_MODEL = {**HISTORY, "speculative_config": {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 4}}


class FakeEngine:
    """What `AsyncLLM` is to the routes; it knows the requests that it is given."""

    def __init__(self, names: set[str] = frozenset(), settings: dict[str, Any] | None = None) -> None:
        self.vllm_config = SimpleNamespace(additional_config={"spec_rollout": settings} if settings else {})
        self.names = names
        self.rewards: dict[str, float] = {}
        self.epoch = 0
        # rewards of each call
        self.reports: list[int] = []
        self.drafters: list[str] = []
        # the load on its way, and how often somebody asked whether it is there
        self.loading: Any = None
        self.looks = 0
        self.given_up = ""
        self.history: dict[str, Any] = {"hits": 1, "lookups": 4, "hit_rate": 0.25}

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self, method)(*args)]

    def spec_rollout_report_rewards(self, rewards: list[tuple[list[str], float]]) -> dict[str, int]:
        if self.given_up:
            return {"cause": self.given_up, "hint": "start the engine anew"}
        counts = {"matched": 0, "repeated": 0, "unknown": 0}
        self.reports.append(len(rewards))
        for candidates, reward in rewards:
            name = next((name for name in candidates if name in self.names), "")
            counts["repeated" if name in self.rewards else "matched" if name else "unknown"] += 1
            if name:
                self.rewards[name] = reward
        return counts

    def spec_rollout_begin_epoch(self, epoch: int | None) -> Any:
        if self.given_up:
            return {"cause": self.given_up, "hint": "start the engine anew"}
        if epoch is not None and epoch < self.epoch:
            raise ValueError(f"the epoch is {epoch}")
        self.epoch = self.epoch + 1 if epoch is None else epoch
        return self.epoch

    def spec_rollout_load_drafter(self, name: str, path: str, below: str) -> dict[str, Any]:
        self.loading, self.looks = (name, path, below), 0
        return {}

    def spec_rollout_drafter_ready(self, name: str) -> dict[str, Any]:
        """At the third look."""
        (known, path, below), self.looks = self.loading, self.looks + 1
        assert name == known
        if not path.startswith(below):
            return {"cause": f"`{path}` leads out", "hint": "give a path below", "is_forbidden": True}
        if not path.startswith("/drafters/heads/"):
            return {"cause": f"`{path}` holds no safetensors", "hint": "give a folder"}
        return {"is_ready": self.looks > 2}

    def spec_rollout_end_drafter(self, name: str, is_taken: bool) -> dict[str, Any]:
        (known, path, _), self.loading = self.loading, None
        assert name == known and (self.looks == 3) == is_taken
        if not is_taken:
            return {}
        self.drafters.append(path)
        return {"tensors": 12, "version": len(self.drafters)}

    def spec_rollout_health(self) -> dict[str, Any]:
        alive = {"state": "alive", "failed": 0, "error": "", "steps": 0}
        gone = {"state": "given up", "failed": 5, "error": self.given_up, "steps": 0}
        return {"budget": alive, "drafters": {"history": gone if self.given_up else alive}}

    def spec_rollout_history(self) -> dict[str, Any]:
        if self.given_up:
            return {"cause": self.given_up, "hint": "start the engine anew"}
        store = {"epoch": self.epoch, "lowest": self.epoch, "answers": len(self.rewards), "memory_bytes": 1024}
        return {"store": store, **self.history}


MakeApp = Callable[..., FastAPI]


@pytest.fixture
def make_app(monkeypatch: pytest.MonkeyPatch) -> MakeApp:
    """`make_app(engine, keys)`: an app wired as vLLM wires it."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("SPECROLLOUT_DRAFTERS", "/drafters")
    return wired


def wired(engine: FakeEngine | None, keys: list[str] | None = None) -> FastAPI:
    from vllm_specrollout.server.endpoints import SpecRolloutEndpoints

    app = FastAPI()
    app.state.args = Namespace(api_key=keys)
    plugin = SpecRolloutEndpoints()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(engine, app.state, app.state.args))
    return app


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine({"chatcmpl-a", "0_chatcmpl-b", "1_chatcmpl-b", "cmpl-c-0"}, HISTORY)


@pytest.fixture
def client(make_app: MakeApp, engine: FakeEngine) -> TestClient:
    return TestClient(make_app(engine))


def reward(request_id: str, value: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"request_id": request_id, "reward": value, **more}


def report(client: TestClient, *rewards: Any, **options: Any) -> Any:
    return client.post("/spec_rollout/rewards", json={"rewards": rewards}, **options)


def ask(app: FastAPI, headers: list[tuple[bytes, bytes]], chunks: list[bytes]) -> tuple[int, int]:
    """Drive an app by hand; returns its status and how many parts of the body it took."""
    taken, sent = 0, list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": chunks[taken - 1], "more_body": taken < len(chunks)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/spec_rollout/rewards",
        "headers": [(b"content-type", b"application/json"), *headers],
        "query_string": b"",
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], taken
