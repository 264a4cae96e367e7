"""A drafter's process: begun with patience, ended with its engine."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_specrollout.cluster.child import (
    KV_CACHE,
    LOAD_S,
    MOST_RESTARTS,
    RECOVERED_S,
    Command,
    DrafterProcess,
    DrafterProcessError,
)
from vllm_specrollout.config import envs
from vllm_specrollout.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Script(Command):
    """Runs a line of Python in the place of an engine."""

    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-S", "-c", self.model]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stand_still(process: DrafterProcess) -> None:
    """It hears no further signal once it has stopped."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def ended(process: DrafterProcess) -> None:
    assert process._process is not None
    process._process.wait()


def test_a_process_that_lives_is_left_alone() -> None:
    process = DrafterProcess(Script("import time; time.sleep(60)", "ipc:///x"))
    assert process.is_alive and not process.watch()
    pid = process.pid
    assert not process.watch() and process.pid == pid
    process.stop()
    assert not process.is_alive and process.pid is None
    process.stop()


def test_a_process_that_ends_is_begun_anew_with_ever_more_patience() -> None:
    clock = Clock()
    process = DrafterProcess(Script("raise SystemExit(3)", "ipc:///x"), clock)
    for number in range(MOST_RESTARTS):
        ended(process)
        assert process.watch(), "it is noticed"
        pid = process.pid
        clock.now += 2**number - 0.01
        process.watch()
        assert process.pid == pid, "not at once"
        clock.now += 0.02
        assert not process.watch()
        assert process.pid != pid and process.restarts == number + 1
    ended(process)
    with pytest.raises(DrafterProcessError, match="status 3, and was begun anew 5 times"):
        process.watch()
    process.stop()


def test_ends_before_an_hour_of_work_do_not_count() -> None:
    clock = Clock()
    process = DrafterProcess(Script("import time; time.sleep(60)", "ipc:///x"), clock)
    for number in range(3 * MOST_RESTARTS):
        process.is_ready = True
        clock.now += RECOVERED_S
        assert not process.watch()
        process.kill()
        ended(process)
        assert process.watch()
        clock.now += 1.0
        assert not process.watch() and process.is_alive, "with the patience of a first time"
        assert process.restarts == number + 1, "all of them are told"
    process.stop()


@pytest.mark.parametrize("is_ready", [False, True])
def test_an_hour_in_which_nobody_saw_it_live_or_work_is_none_of_work(is_ready: bool) -> None:
    clock = Clock()
    process = DrafterProcess(Script("import time; time.sleep(60)", "ipc:///x"), clock)
    for _ in range(MOST_RESTARTS):
        process.is_ready = is_ready
        process.kill()
        ended(process)
        clock.now += RECOVERED_S + 1.0
        assert process.watch()
        clock.now += 100.0
        process.watch()
    process.kill()
    ended(process)
    with pytest.raises(DrafterProcessError, match="begun anew 5 times"):
        process.watch()


def test_a_process_that_loads_for_too_long_is_killed_and_begun_anew() -> None:
    clock = Clock()
    process = DrafterProcess(Script("import time; time.sleep(60)", "ipc:///x"), clock)
    clock.now = LOAD_S
    assert not process.watch() and process.is_alive, "large models take their time"
    clock.now += 1.0
    assert not process.watch()
    ended(process)
    assert process.watch()
    clock.now += 1.0
    assert not process.watch()
    process.is_ready = True
    clock.now += LOAD_S + 1.0
    assert not process.watch() and not process.watch() and process.is_alive, "the next one has loaded"
    process.stop()


def test_a_host_without_room_fails_no_engines_start_and_each_try_is_counted_as_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    popen = subprocess.Popen

    def refused(*_: Any, **__: Any) -> None:
        clock.now += 0.25
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    process = DrafterProcess(Script("import time; time.sleep(60)", "ipc:///x"), clock)
    assert process.pid is None and process.watch(), "its engine starts all the same"
    clock.now += 1.0
    assert not process.watch() and process.restarts == 2
    assert process.waited_s == 0.25, "the first one was begun before there were any requests"
    monkeypatch.setattr(subprocess, "Popen", popen)
    clock.now += 2.25
    assert not process.watch() and process.is_alive and process.restarts == 2
    process.stop()


def test_a_host_without_room_for_a_process_costs_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    process = DrafterProcess(Script("raise SystemExit(3)", "ipc:///x"), clock)
    ended(process)
    assert process.watch()

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EAGAIN, "no process left")

    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", refuse)
        clock.now += 1.0
        assert not process.watch() and process.restarts == 2 and not process.is_alive
        clock.now += 1.9
        assert not process.watch() and process.restarts == 2, "with more patience"
    clock.now += 0.1
    assert not process.watch() and process.pid is not None
    ended(process)
    assert process.watch()
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", refuse)
        with pytest.raises(DrafterProcessError, match="could not be begun: .* no process left, and was begun anew 5 t"):
            while True:
                clock.now += 100.0
                process.watch()
    process.stop()


def test_a_process_that_hangs_is_begun_anew_once_it_is_killed() -> None:
    clock = Clock()
    process = DrafterProcess(Script("import time; time.sleep(60)", "ipc:///x"), clock)
    process.kill()
    assert process.waited_s == 0.0, "whoever kills it does not wait for its end"
    ended(process)
    assert process.watch()
    clock.now += 1.0
    process.watch()
    assert process.is_alive
    process.stop()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_process_is_bound_to_the_thread_that_begins_it_where_that_lives_as_long_as_the_engine(
    monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    monkeypatch.setattr("threading.get_native_id", lambda: os.getpid() + (not is_first))
    script = "import sys; raise SystemExit(10 + sys.argv.count('--bound'))"
    process = DrafterProcess(Script(script, "ipc:///x"))
    assert process._process is not None
    assert process._process.wait() == 10 + is_first


def test_a_dismissed_process_that_hangs_is_killed_once_it_had_its_time() -> None:
    clock = Clock()
    process = DrafterProcess(Script("import time; time.sleep(60)", "ipc:///x"), clock)
    popen = process._process
    assert popen is not None
    stand_still(process)
    process.dismiss()
    clock.now += 1.9
    process.dismiss()  # a second time it gets no more of it
    assert not process.see_off() and not process.watch() and process.is_alive
    clock.now += 0.1
    assert not process.see_off(), "nobody waits for its end"
    assert popen.wait() == -signal.SIGKILL
    assert process.see_off() and process.waited_s == 0.0
    clock.now += 100.0
    assert not process.watch() and not process.is_alive, "nor is it begun anew"
    process.stop()


def test_processes_that_were_dismissed_together_hang_for_the_time_of_one() -> None:
    """An engine that ends has only so long before it is killed itself."""
    clock = Clock()
    processes = [DrafterProcess(Script("import time; time.sleep(60)", "ipc:///x"), clock) for _ in range(3)]
    waits: list[float | None] = []
    for process in processes:
        assert process._process is not None
        stand_still(process)
        process.dismiss()
        process._process.wait = hanging(process._process, clock, waits)  # type: ignore[method-assign]
    for process in processes:
        process.stop()
    assert waits == [2.0, None, 0.0, None, 0.0, None]


def hanging(popen: subprocess.Popen[bytes], clock: Clock, waits: list[float | None]) -> Callable[..., int]:
    wait = popen.wait

    def hang(timeout: float | None = None) -> int:
        waits.append(timeout)
        if timeout is None:
            return wait()
        clock.now += timeout
        raise subprocess.TimeoutExpired("it", timeout)

    return hang


def test_a_dismissed_process_ends_without_anybody_waiting() -> None:
    process = DrafterProcess(Script("import time; time.sleep(60)", "ipc:///x"))
    process.dismiss()
    assert process.waited_s == 0.0
    ended(process)
    process.stop()
    assert not process.is_alive and process.waited_s == 0.0, "it had ended before anybody looked"


def test_the_wait_for_an_end_is_counted() -> None:
    clock = Clock()
    process = DrafterProcess(Script("import signal; signal.pause()", "ipc:///x"), clock)
    popen = process._process
    assert popen is not None
    wait = popen.wait

    def slowly(timeout: float | None = None) -> int:
        clock.now += 2.0
        return wait(timeout)

    popen.wait = slowly  # type: ignore[method-assign]
    process.stop()
    assert process.waited_s == 2.0


def test_a_drafters_engine_is_told_its_model_and_cores_and_not_to_speculate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.SPEC_ROLLOUT, "1")
    for name in ("TRITON_INTERPRET", envs.USE_V2_MODEL_RUNNER, "RANK"):
        monkeypatch.setenv(name, "1")
    command = Command.of("small", ("cpu:2-3", "cpu:3", "cpu:5"), {"dtype": "float32"})
    own = ["small", command.address, "--parent", str(os.getpid())]
    args = json.dumps({"dtype": "float32", "kv_cache_memory_bytes": KV_CACHE})
    assert command.argv[3:] == [*own, "--engine-args", args, "--cores", "2,3,5"]
    environment = command.environment
    assert environment["OMP_NUM_THREADS"] == "3" and environment["VLLM_TARGET_DEVICE"] == "cpu"
    assert environment[envs.USE_V2_MODEL_RUNNER] == "0"
    assert not {envs.SPEC_ROLLOUT, "RANK", "TRITON_INTERPRET"} & environment.keys()
    assert command.address != Command.of("small", (), {}).address, "nobody else has it"


def test_a_drafters_engine_on_gpus_is_stock_vllm_with_a_rank_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    command = Command.of("small", ("cuda:1,2",), {})
    environment = command.environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "5,7", "those that this process sees, as the driver counts them"
    assert environment["VLLM_PLUGINS"] == "none" and environment[envs.USE_V2_MODEL_RUNNER] == "1"
    assert environment.get("VLLM_TARGET_DEVICE") != "cpu"
    assert "--stock" in command.argv and "--cores" not in command.argv
    assert command.engine_args == {"tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match="3 GPUs are visible"):
        _ = Command.of("small", ("cuda:3",), {}).environment


def test_cores_beside_gpus_are_no_place_for_one_engine() -> None:
    with pytest.raises(ConfigError, match="cores beside GPUs"):
        Command.of("small", ("cuda:1", "cpu:2"), {})


def test_what_a_killed_engine_left_is_removed_and_what_a_living_one_has_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    names = [f"specrollout-drafter-{pid}-abc" for pid in (gone.pid, os.getpid())]
    for name in (*names, "specrollout-drafter-mine"):
        (tmp_path / name).touch()
    Command.of("small", (), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [names[1], "specrollout-drafter-mine"]
