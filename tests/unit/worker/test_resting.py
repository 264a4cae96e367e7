from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_specrollout.worker.calls import DrafterMixin
from vllm_specrollout.worker.models import decoupled
from vllm_specrollout.worker.v1 import runner as v1
from vllm_specrollout.worker.v2 import runner as v2


class Stepped(Exception):
    """A step was begun: what follows is not looked at."""


class Base:
    """As much of vLLM's worker as is called."""

    done: list[str]

    def sleep(self, level: int) -> None:
        self.done.append("engine asleep")

    def wake_up(self, tags: list[str] | None) -> None:
        self.done.append("engine awake")


class Worker(DrafterMixin, Base):
    def __init__(self, running: dict[str, tuple[int, int]]) -> None:
        self.done, is_awake = [], [False]

        def sleep() -> None:
            self.done += ["drafter asleep"] * is_awake[0]
            is_awake[0] = False

        def wake() -> None:
            self.done += ["drafter awake"] * (not is_awake[0])
            is_awake[0] = True

        command = SimpleNamespace(model="small")
        self._warm: Any = SimpleNamespace(sleep=sleep, wake=wake, address="", process=SimpleNamespace(command=command))
        self.model_runner: Any = SimpleNamespace(
            standing=lambda: running,
            settle=lambda: None,
            model_drafter=None,
            swapper=None,
            step=SimpleNamespace(number=0),
            metrics=SimpleNamespace(nodes_of=lambda sources: (0, 0)),
            vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4)),
        )

    def stand(self) -> None:
        self._standing(SimpleNamespace(links={}))  # type: ignore[arg-type]

    def begun(self, *args: Any) -> None:
        self.done.append("step")
        raise Stepped


def step_on_v1(worker: Worker, output: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v1, "step_of", worker.begun)
    v1.SpecRolloutV1.execute_model(SimpleNamespace(before_step=worker._warm.sleep, _timing=None), output)  # type: ignore[arg-type]


def step_on_v2(worker: Worker, output: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("step_of", "waiting_of", "wanted_of"):
        monkeypatch.setattr(v2, name, lambda output: 0)
    monkeypatch.setattr(v2, "endings_of", lambda output: {})
    monkeypatch.setattr(v2, "begin_step", worker.begun)
    inputs = SimpleNamespace(clear=lambda: None)
    runner = SimpleNamespace(before_step=worker._warm.sleep, inputs=inputs, weights_version=None, swapper=None)
    v2.SpecRolloutV2.execute_model(runner, output)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [step_on_v1, step_on_v2])
def test_a_drafter_gives_its_memory_back_before_a_prefill_and_wakes_up_once_nothing_is_left(
    step: Callable[[Worker, Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    running: dict[str, tuple[int, int]] = {}
    worker = Worker(running)

    def output(tokens: int) -> Any:
        many = {"r": tokens} if tokens else {}
        told = {"total_num_scheduled_tokens": tokens, "num_scheduled_tokens": many}
        return SimpleNamespace(**told, preempted_req_ids=None, finished_req_ids=set())

    worker.stand()
    running["r"] = (3, 0)
    with pytest.raises(Stepped):
        step(worker, output(3), monkeypatch)
    worker.stand()
    with pytest.raises(Stepped):
        step(worker, output(1), monkeypatch)
    running.clear()
    worker.stand()
    worker.stand()
    assert worker.done == ["drafter awake", "drafter asleep", "step", "step", "drafter awake"]


def test_a_drafter_sleeps_as_long_as_its_engine_does() -> None:
    worker = Worker({})
    worker.stand()
    worker.sleep(1)
    worker.stand()
    worker.wake_up(["weights"])
    worker.stand()
    assert worker.done == ["drafter awake", "drafter asleep", "engine asleep", "engine awake"], "training goes on"
    worker.wake_up(["kv_cache"])
    worker.stand()
    assert worker.done[4:] == ["engine awake", "drafter awake"]


@pytest.mark.parametrize(
    ("kind", "cores", "devices", "expected"),
    [
        ("cuda", "", (), ["cuda:2"]),
        ("cuda", "", ("cuda:5",), ["cuda:5"]),
        ("cpu", "0-1|4", (), ["cpu:0,1,4"]),
        ("cpu", "auto", (), [None]),
    ],
)
def test_a_drafter_has_a_share_of_its_engines_devices_where_none_are_named(
    monkeypatch: pytest.MonkeyPatch, kind: str, cores: str, devices: tuple[str, ...], expected: list[str | None]
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores)
    begun: list[Any] = []
    monkeypatch.setattr(decoupled, "WarmDrafter", begun.append)
    model = SimpleNamespace(dtype="torch.float32", max_model_len=100, enforce_eager=True)
    scheduler = SimpleNamespace(max_num_seqs=256)
    runner = SimpleNamespace(
        device=SimpleNamespace(type=kind, index=2 if kind == "cuda" else None),
        vllm_config=SimpleNamespace(model_config=model, scheduler_config=scheduler),
    )
    decoupled.warm(runner, "small", devices, {"max_model_len": 50})
    (command,) = begun
    assert [command.devices and str(command.devices)] == expected
    assert command.engine_args["max_model_len"] == 50
    on_gpu = {"enable_sleep_mode": True, "kv_cache_memory_bytes": 2 << 30, "max_num_seqs": 64}
    assert kind == "cpu" or command.engine_args.items() >= on_gpu.items()
    assert kind == "cuda" or command.engine_args["max_num_seqs"] == 256
