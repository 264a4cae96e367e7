"""Engines inside a trainer's actors are asked through Ray, in the loop that has them, and nobody waits for them."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ray")

import ray

from vllm_specrollout.cluster import GroupError, lend
from vllm_specrollout.cluster.ray.trainer import asking, inside


class Engine:
    """As much of an `AsyncLLM` as is asked, made in the loop that has it."""

    def __init__(self) -> None:
        self.output_handler = asyncio.ensure_future(asyncio.sleep(600.0))
        self.thread = threading.get_ident()

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        assert threading.get_ident() == self.thread, "an engine is asked in its own loop"
        return [[method, *args]]


@pytest.fixture
def engine() -> Iterator[Engine]:
    """In a loop that goes on in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def make() -> Engine:
        return Engine()

    yield asyncio.run_coroutine_threadsafe(make(), loop).result(60.0)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60.0)


@pytest.mark.parametrize("name", ["engine", "llm"])
def test_the_engine_of_either_trainers_actor_is_asked_in_its_loop(engine: Engine, name: str) -> None:
    assert inside(SimpleNamespace(**{name: engine}), "assign_drafter", ("a", ["r"])) == [["assign_drafter", "a", ["r"]]]


def handle() -> Any:
    """Of an actor, as Ray has it."""
    own = SimpleNamespace(remote=Mock(return_value=Mock(future=Future)))
    return SimpleNamespace(__ray_call__=own)


def test_asking_returns_at_once_what_is_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    actor = handle()
    found = asking(actor)("spec_rollout_standing", ())
    assert isinstance(found, Future) and not found.done()
    actor.__ray_call__.remote.assert_called_once_with(inside, "spec_rollout_standing", ())


def test_nobody_is_asked_once_ray_has_ended_since_that_would_begin_it_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    actor = handle()
    with pytest.raises(GroupError, match="Ray has ended"):
        asking(actor)("spec_rollout_standing", ())
    assert not actor.__ray_call__.remote.called
    lending = lend([actor, actor])
    assert list(lending.status()["engines"]) == ["engine-0", "engine-1"]
    assert lending._thread is not None
    lending._thread.join(60.0)
    assert not lending._thread.is_alive(), "it has nothing left to do"
    lending.close()
