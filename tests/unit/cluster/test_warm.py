"""Drafters kept warm: ready when they say so, begun anew when they end, and gone with their pool."""

import errno
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_specrollout.cluster.child import LOAD_S, MOST_RESTARTS, Command
from vllm_specrollout.cluster.warm import WarmPool
from vllm_specrollout.errors import ConfigError

PATIENCE_S = 20.0
READY = "import os, signal, sys; open(sys.argv[1], 'w').write(str(os.getpid())); signal.pause()"
SLOW = "import signal; signal.pause()"


@dataclass(frozen=True, slots=True)
class Script(Command):
    """Runs a line of Python in the place of an engine."""

    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-S", "-c", self.model, self.ready]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def until_ready(pool: WarmPool, name: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not pool.is_ready(name):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_drafter_is_ready_when_it_says_so_and_ends_with_its_pool() -> None:
    with WarmPool({"fast": Script(READY, "shm://a"), "slow": Script(SLOW, "shm://b")}) as pool:
        until_ready(pool, "fast")
        assert not pool.is_ready("slow") and pool.watch() == []
        assert pool.addresses == {"fast": "shm://a", "slow": "shm://b"}
        pids = [pool.pid(name) for name in ("fast", "slow")]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_one_that_ends_is_begun_anew_and_says_anew_that_it_is_ready() -> None:
    clock = Clock()
    with WarmPool({"it": Script(READY, "shm://a")}, clock) as pool:
        until_ready(pool, "it")
        pid = pool.pid("it")
        assert pid is not None
        os.kill(pid, 9)
        end = time.monotonic() + PATIENCE_S
        while not (ended := pool.watch()):
            assert time.monotonic() < end
        assert ended == ["it"] and not pool.is_ready("it")
        clock.now += 1.0
        assert pool.watch() == [] and pool.pid("it") != pid
        until_ready(pool, "it")


def test_one_that_never_gets_ready_is_begun_anew_and_one_that_is_ready_stays() -> None:
    clock = Clock()
    with WarmPool({"fast": Script(READY, "shm://a"), "slow": Script(SLOW, "shm://b")}, clock) as pool:
        until_ready(pool, "fast")
        pids = pool.pid("fast"), pool.pid("slow")
        clock.now = LOAD_S + 1.0
        end = time.monotonic() + PATIENCE_S
        while pool.watch() != ["slow"]:
            assert time.monotonic() < end
        clock.now += 1.0
        assert pool.watch() == []
        assert pool.pid("fast") == pids[0] and pool.pid("slow") != pids[1]


def test_one_that_ends_too_often_is_left_and_the_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with WarmPool({"bad": Script("raise SystemExit(3)", "shm://a"), "good": Script(READY, "shm://b")}, clock) as pool:
        end = time.monotonic() + PATIENCE_S
        while not pool.failures:
            assert time.monotonic() < end
            pool.watch()
            clock.now += 100.0
            time.sleep(0.01)
        assert f"begun anew {MOST_RESTARTS} times" in pool.failures["bad"]
        assert pool.watch() == []
        assert [one.message for one in caplog.records if "`bad` drafts no more" in one.message]
        until_ready(pool, "good")


def test_a_host_without_room_for_a_drafter_costs_a_try_and_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with WarmPool({"it": Script("raise SystemExit(3)", "shm://a")}, clock) as pool:
        end = time.monotonic() + PATIENCE_S
        while not pool.watch():
            assert time.monotonic() < end

        def refuse(*args: object, **kwargs: object) -> None:
            raise OSError(errno.ENOMEM, "no memory left")

        monkeypatch.setattr("subprocess.Popen", refuse)
        while not pool.failures:
            clock.now += 100.0
            pool.watch()
        assert "no memory left" in pool.failures["it"] and not pool.is_ready("it")


def test_two_drafters_cannot_have_one_address() -> None:
    with pytest.raises(ConfigError, match="two drafters have one address"):
        WarmPool({"one": Script(READY, "shm://a"), "other": Script(READY, "shm://a")})


def test_a_warm_drafter_serves_stays_and_says_when_it_is_ready() -> None:
    assert Command("small", "shm://x", stays=True, ready="file").argv[-3:] == ["--stay", "--ready", "file"]
