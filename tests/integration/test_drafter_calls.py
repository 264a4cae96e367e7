"""Calls of a worker on drafters: weights after a sleep that threw them away, a warm drafter, how the engine stands."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from vllm_specrollout.errors import ConfigError
from vllm_specrollout.worker import calls
from vllm_specrollout.worker.calls import DrafterMixin
from vllm_specrollout.worker.models.swapping import Swapper


class Asleep:
    """In the place of vLLM's worker."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        drafter = SimpleNamespace(of_vllm=SimpleNamespace(path=Path("first")))
        drop = SimpleNamespace(drop=lambda drafter, error: self.told.append(str(error)))
        own = {"model_drafter": drafter, "spec_rollout": drop, "swapper": None}
        self.model_runner = SimpleNamespace(**own, settle=lambda: None)

    def sleep(self, level: int) -> None:
        self.told.append(level)

    def wake_up(self, tags: list[str] | None) -> None:
        self.told.append(tags)

    def shutdown(self) -> None:
        self.told.append("the end")


class Worker(DrafterMixin, Asleep):
    """Ours over it."""


@pytest.fixture(autouse=True)
def _is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "is_first_rank", lambda: True)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where weights were loaded from again."""
    paths: list[Path] = []
    monkeypatch.setattr(Swapper, "again", lambda self: paths.append(self._runner.model_drafter.of_vllm.path))
    return paths


@pytest.mark.parametrize(("level", "paths"), [(1, []), (2, [Path("first")])])
def test_weights_that_a_sleep_threw_away_are_loaded_once(loaded: list[Path], level: int, paths: list[Path]) -> None:
    worker = Worker()
    worker.sleep(level)
    worker.wake_up(["kv_cache"])
    assert loaded == []
    worker.wake_up(["weights"])
    worker.wake_up(None)
    assert loaded == paths and worker.told == [level, ["kv_cache"], ["weights"], None]


def test_a_drafter_whose_weights_are_gone_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Swapper) -> None:
        raise ConfigError("`first` holds no safetensors", "give another")

    monkeypatch.setattr(Swapper, "again", fails)
    worker = Worker()
    worker.sleep(2)
    worker.wake_up(None)
    assert worker.model_runner.model_drafter is None and worker.told[-1].startswith("`first` holds no safetensors")


def test_an_engine_without_a_model_that_drafts_says_so() -> None:
    worker = Worker()
    worker.model_runner.model_drafter = None
    answer = worker.spec_rollout_load_drafter("a", "second")
    assert answer["cause"] == "no model drafts in this engine" and not answer["is_forbidden"]
    assert "were dropped" in worker.spec_rollout_end_drafter("a", is_taken=True)["cause"]


def test_an_engine_that_is_not_decoupled_says_so_and_how_to_make_it_one() -> None:
    worker = Worker()
    for call in (
        lambda: worker.attach_drafter("one", "ipc:///x"),
        lambda: worker.detach_drafter("one"),
        lambda: worker.assign_drafter("one", None),
        worker.drafters_state,
        worker.spec_rollout_standing,
        lambda: worker.spec_rollout_warm("small"),
    ):
        answer = call()
        assert "`placement` is `coupled`" in answer["cause"] and '{"placement": "decoupled"}' in answer["hint"]


def test_ranks_that_do_not_draft_have_no_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "is_first_rank", lambda: False)
    worker = Worker()
    assert worker.attach_drafter("one", "ipc:///x") == worker.drafters_state() == {}
    assert worker.spec_rollout_warm("small") == worker.spec_rollout_standing() == {}


class Warm:
    """In the place of a warm drafter."""

    def __init__(self, model: str) -> None:
        self.process, self.address = SimpleNamespace(command=SimpleNamespace(model=model)), ""
        self.is_stopped = False

    def sleep(self) -> None:
        pass

    def stop(self) -> None:
        self.is_stopped = True


def test_a_warm_drafter_is_begun_once_and_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, Any, Any]] = []

    def warm(runner: Any, model: str, devices: Any, engine_args: Any) -> Warm:
        if not model:
            raise ConfigError("a drafter has an empty `model`", "name one")
        begun.append((model, devices, engine_args))
        return Warm(model)

    monkeypatch.setattr(calls.decoupled, "attached", lambda runner: None)
    monkeypatch.setattr(calls.decoupled, "warm", warm)
    worker = Worker()
    assert worker.spec_rollout_warm("") == {"cause": "a drafter has an empty `model`", "hint": "name one"}
    for model in ("small", "other"):
        assert worker.spec_rollout_warm(model, ["cpu:1"], {"seed": 1}) == {"model": "small"}
    assert begun == [("small", ["cpu:1"], {"seed": 1})]
    assert worker.model_runner.before_step == worker._warm.sleep, "it has given its memory back before each step"
    worker.shutdown()
    assert worker._warm.is_stopped and worker.told == ["the end"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_worker_waits_without_its_core_where_a_drafter_needs_it(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = calls.decoupled
    monkeypatch.setattr(here, "WarmDrafter", lambda command: command)
    monkeypatch.setattr(here, "_command", lambda given, vllm_config: given.model)
    with zmq.Context() as context:
        spinner = SpinCondition(is_reader=True, context=context, notify_address=f"ipc://{tmp_path}/calls")
        was = spinner.busy_loop_s
        runner = SimpleNamespace(device=torch.device(kind), vllm_config=None)
        assert here.warm(runner, "small", (f"{kind}:0",), {}) == "small"
        assert was > 0 and spinner.busy_loop_s == (0 if kind == "cpu" else was)
        # a call is not waited for in vain
        assert spinner.wait(timeout_ms=1) is None
        for socket in (spinner.local_notify_socket, spinner.write_cancel_socket, spinner.read_cancel_socket):
            socket.close(0)


def test_an_engine_says_how_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {"its own": SimpleNamespace(only=None), "lent": SimpleNamespace(only=frozenset({"b", "a"}))}
    monkeypatch.setattr(calls.decoupled, "attached", lambda runner: SimpleNamespace(links=links))
    worker = Worker()
    worker.model_runner.standing = lambda: {"a": (5, 2)}
    worker.model_runner.step = SimpleNamespace(number=7)
    worker.model_runner.metrics = SimpleNamespace(nodes_of={("decoupled", "decoupled_alternatives"): (9, 4)}.get)
    worker.model_runner.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=32))
    found = worker.spec_rollout_standing()
    assert found.pop("host")
    assert found == {
        "running": {"a": (5, 2)},
        "steps": 7,
        "places": 32,
        "drafter": "",
        "model": "",
        "attached": {"lent": ["a", "b"]},
        "verified": 9,
        "accepted": 4,
    }
    worker._warm = Warm("small")
    worker._warm.address = "ipc://x"
    found = worker.spec_rollout_standing()
    assert (found["drafter"], found["model"]) == ("ipc://x", "small")
