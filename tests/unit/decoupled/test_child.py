"""A drafter's process: begun with patience, ended with its engine."""

import errno
import os
import sys
from dataclasses import dataclass

import pytest

from vllm_specrollout import envs
from vllm_specrollout.decoupled.child import MOST_RESTARTS, Command, DrafterProcess, DrafterProcessError, cores_of


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


def ended(process: DrafterProcess) -> None:
    assert process._process is not None
    process._process.wait()


def test_a_process_that_lives_is_left_alone() -> None:
    process = DrafterProcess(Script("import time; time.sleep(60)", "shm://x"))
    assert process.is_alive and not process.watch()
    pid = process.pid
    assert not process.watch() and process.pid == pid
    process.stop()
    assert not process.is_alive and process.pid is None
    process.stop()


def test_a_process_that_ends_is_begun_anew_with_ever_more_patience() -> None:
    clock = Clock()
    process = DrafterProcess(Script("raise SystemExit(3)", "shm://x"), clock)
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


def test_a_host_without_room_for_a_process_costs_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    process = DrafterProcess(Script("raise SystemExit(3)", "shm://x"), clock)
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
    process = DrafterProcess(Script("import time; time.sleep(60)", "shm://x"), clock)
    process.kill()
    assert process.waited_s == 0.0, "whoever kills it does not wait for its end"
    ended(process)
    assert process.watch()
    clock.now += 1.0
    process.watch()
    assert process.is_alive
    process.stop()


def test_a_dismissed_process_ends_without_anybody_waiting() -> None:
    process = DrafterProcess(Script("import time; time.sleep(60)", "shm://x"))
    process.dismiss()
    assert process.waited_s == 0.0
    ended(process)
    process.stop()
    assert not process.is_alive and process.waited_s == 0.0, "it had ended before anybody looked"


def test_the_wait_for_an_end_is_counted() -> None:
    clock = Clock()
    process = DrafterProcess(Script("import signal; signal.pause()", "shm://x"), clock)
    popen = process._process
    assert popen is not None
    wait = popen.wait

    def slowly(timeout: float | None = None) -> int:
        clock.now += 2.0
        return wait(timeout)

    popen.wait = slowly  # type: ignore[method-assign]
    process.stop()
    assert process.waited_s == 2.0


def test_the_drafters_engine_is_told_its_model_and_cores_and_not_to_speculate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.SPEC_ROLLOUT, "1")
    monkeypatch.setenv("RANK", "3")
    command = Command("small", "shm://x", {"dtype": "float32"}, cores_of(("cpu:2-3", "cpu:3", "cpu:5")))
    assert command.cores == (2, 3, 5)
    own = ["small", "shm://x", "--parent", str(os.getpid())]
    assert command.argv[3:] == [*own, "--engine-args", '{"dtype": "float32"}', "--cores", "2,3,5"]
    assert command.environment["OMP_NUM_THREADS"] == "3"
    assert command.environment["VLLM_PLUGINS"] == "none"
    assert envs.SPEC_ROLLOUT not in command.environment and "RANK" not in command.environment
