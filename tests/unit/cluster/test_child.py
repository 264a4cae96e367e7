"""A drafter's process: begun with patience, ended with its engine."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from tests.unit.cluster.beside import Beside, write
from tests.waiting import until
from vllm_specrollout.cluster import child as module
from vllm_specrollout.cluster import leftovers
from vllm_specrollout.cluster.child import Command, DrafterProcess, DrafterProcessError, WarmDrafter
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


SLEEPS = "import time; time.sleep(60)"


def begun(script: str = "raise SystemExit(3)") -> tuple[DrafterProcess, Clock]:
    clock = Clock()
    return DrafterProcess(Script(script, "ipc:///x"), clock), clock


def stand_still(process: DrafterProcess) -> None:
    """It hears no further signal once it has stopped."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def ended(process: DrafterProcess) -> None:
    assert process._process is not None
    process._process.wait()


def test_a_process_that_ends_is_begun_anew_with_ever_more_patience() -> None:
    process, clock = begun()
    for number in range(module.MOST_RESTARTS):
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
    with pytest.raises(DrafterProcessError, match="status 3, and was begun anew 3 times"):
        process.watch()
    process.stop()


def test_a_process_that_loads_for_too_long_is_killed_and_begun_anew() -> None:
    process, clock = begun(SLEEPS)
    clock.now = module.START_S
    assert not process.watch() and process.is_alive, "large models take their time"
    clock.now += 1.0
    assert not process.watch()
    ended(process)
    assert process.watch()
    clock.now += 1.0
    assert not process.watch()
    process.is_ready = True
    clock.now += module.START_S + 1.0
    assert not process.watch() and not process.watch() and process.is_alive, "the next one has loaded"
    process.stop()


def test_a_host_without_room_for_a_process_costs_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    process, clock = begun()
    ended(process)
    assert process.watch()

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EAGAIN, "no process left")

    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", refuse)
        clock.now += 1.0
        assert not process.watch() and process.watch() and process.restarts == 2 and not process.is_alive
        clock.now += 1.9
        assert not process.watch() and process.restarts == 2, "with more patience"
    clock.now += 0.1
    assert not process.watch() and process.pid is not None
    ended(process)
    assert process.watch()
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", refuse)
        with pytest.raises(DrafterProcessError, match="could not be begun: .* no process left, and was begun anew 3 t"):
            while True:
                clock.now += 100.0
                process.watch()
    process.stop()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_process_is_bound_to_the_thread_that_begins_it_where_that_lives_as_long_as_the_engine(monkeypatch, is_first):
    monkeypatch.setattr("threading.get_native_id", lambda: os.getpid() + (not is_first))
    process, _ = begun("import sys; raise SystemExit(10 + sys.argv.count('--bound'))")
    assert process._process is not None
    assert process._process.wait() == 10 + is_first


def test_a_dismissed_process_that_hangs_is_killed_once_it_had_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.05)
    processes = [begun(SLEEPS)[0] for _ in range(3)]
    popens = [process._process for process in processes]
    for process in processes:
        stand_still(process)
        process.dismiss()
        assert not process.watch() and process.is_alive, "nobody waits for its end"
    for process, popen in zip(processes, popens, strict=True):
        process.stop()
        assert popen is not None and popen.returncode == -signal.SIGKILL
        assert not process.watch() and process.pid is None, "nor is it begun anew"


def test_a_drafters_engine_is_told_its_model_and_cores_and_not_to_speculate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.SPEC_ROLLOUT, "1")
    for name in ("TRITON_INTERPRET", envs.USE_V2_MODEL_RUNNER, "RANK"):
        monkeypatch.setenv(name, "1")
    command = Command.of("small", ("cpu:2-3", "cpu:3", "cpu:5"), {"dtype": "float32"})
    own = ["small", command.address, "--parent", str(os.getpid())]
    args = json.dumps({"dtype": "float32", "kv_cache_memory_bytes": module.KV_CACHE})
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


def test_what_a_killed_engine_left_is_removed_and_what_a_living_one_has_is_not(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(leftovers, "SHM", tmp_path)
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    for pid, segment in ((gone.pid, "psm_0a"), (os.getpid(), "psm_0b")):
        (tmp_path / f"specrollout-drafter-{pid}-abc").touch()
        (tmp_path / segment).touch()
        (tmp_path / f"specrollout-shared-{pid}-").write_text(f"{segment}\n../{segment}\nother")
    (tmp_path / "other").touch()
    (tmp_path / "specrollout-drafter-mine").touch()
    Command.of("small", (), {})
    left = {path.name for path in tmp_path.iterdir()}
    own = {f"specrollout-{what}-{os.getpid()}-" for what in ("drafter", "shared")}
    assert {name.removesuffix("abc") for name in left} == own | {"psm_0b", "other", "specrollout-drafter-mine"}


def test_shared_memory_is_noted_under_the_process_that_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    leftovers.note_shared()
    assert not list(tmp_path.iterdir()), "there is none"
    own = SharedMemory(create=True, size=4096)
    leftovers.note_shared()
    assert (tmp_path / f"specrollout-shared-{os.getpid()}-").read_text() == own.name
    own.close()
    own.unlink()


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[tuple[WarmDrafter, Path]]:
    """A drafter beside this process, and the diary of both."""
    diary = tmp_path / "diary"
    drafter = WarmDrafter(Beside(str(diary), f"ipc://{tmp_path}/socket"))
    until(lambda: drafter.is_ready)
    yield drafter, diary
    drafter.stop()


def test_a_drafter_begins_asleep_and_has_given_its_memory_back_before_the_engine_goes_on(beside) -> None:
    drafter, diary = beside
    assert not drafter.address
    drafter.sleep()
    for _ in range(2):
        drafter.wake()
        until(lambda: drafter.address)
        drafter.sleep()
        write(str(diary), "prefill")
        assert not drafter.address
    drafter.wake()
    drafter.sleep()  # before it has heard of that
    write(str(diary), "prefill")
    said = [line.partition(" on")[0] for line in diary.read_text().splitlines()]
    assert said == ["asleep", *("awake", "asleep", "prefill") * 3]


def test_a_drafter_that_hangs_is_killed_before_the_engine_goes_on_and_sleeps_in_its_next_life(beside, monkeypatch):
    drafter, _ = beside
    monkeypatch.setattr(module, "REST_S", 0.1)
    drafter.wake()
    until(lambda: drafter.address)
    pid = drafter.process.pid
    stand_still(drafter.process)
    drafter.sleep()
    assert not drafter.process.is_alive and not drafter.address
    until(lambda: drafter.is_ready)
    assert drafter.process.pid != pid and not drafter.address, "it is not woken by what its former life was told"
    drafter.wake()
    until(lambda: drafter.address)


def test_a_drafter_that_died_awake_keeps_nobody_waiting(beside: tuple[WarmDrafter, Path]) -> None:
    drafter, _ = beside
    drafter.wake()
    until(lambda: drafter.address)
    drafter.process.kill()
    ended(drafter.process)
    drafter.sleep()
    assert not drafter.address
