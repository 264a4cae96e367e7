"""Drafters that stay while engines come and go, over real mailboxes: nothing is left of those that went."""

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.reference.decoupled import VOCABULARY, FakeEngine, FakeNoise, token_at
from vllm_specrollout.cluster.address import connect, open_mailbox
from vllm_specrollout.cluster.loop import Loop
from vllm_specrollout.cluster.mailbox import Mailbox, MailboxError
from vllm_specrollout.drafters.decoupled import DecoupledDrafter
from vllm_specrollout.types import DraftLimits, RequestBatch, RequestView

PATIENCE_S = 20.0


class Served:
    """A drafter that serves at an address, and stays."""

    def __init__(self, address: str) -> None:
        self.mailbox = open_mailbox(address, serve=True)
        self.engine = FakeEngine(random.Random(1), accuracy=(1.0, 1.0))
        self.loop = Loop(self.engine, self.mailbox, clock=lambda: 0.0, stays=True)
        self.loop._greet()

    def turn_until(self, holds: object, engine: "Engine | None" = None) -> None:
        """Sockets need a while: turn until that is so."""
        end = time.monotonic() + PATIENCE_S
        while not holds():  # type: ignore[operator]
            assert time.monotonic() < end, "it never came"
            if self.mailbox.wait(0.0) or self.engine.may_draft:
                self.loop.turn()
            if engine is not None:
                engine.step()


class Engine:
    """The side of one verifier: a request, which is drafted for and goes on as drafted."""

    def __init__(self) -> None:
        self.noise = FakeNoise()
        self.drafter = DecoupledDrafter(self.noise, 0, vocab_size=VOCABULARY)
        self.tokens = [7, 8, 9]
        self.most = 0  # nodes proposed

    def step(self) -> None:
        self.noise.lengths = {"0": len(self.tokens)}
        batch = RequestBatch.of([RequestView("0", np.asarray(self.tokens, np.int32), 3, 100)])
        trees = self.drafter.propose(batch, DraftLimits(batch.max_nodes, batch.max_depth, batch.is_chain))
        self.most = max(self.most, trees.num_nodes)
        if trees.num_nodes:
            self.tokens.append(token_at(0, len(self.tokens)))


@pytest.fixture(params=["shm", "ipc"])
def served(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    # one thread is both ends here: whoever rests keeps the other one waiting
    monkeypatch.setattr("vllm_specrollout.cluster.loop._IDLE_S", 0.0)
    address = f"shm://attaching-{os.getpid()}" if request.param == "shm" else f"ipc://{tmp_path}/socket"
    served = Served(address)
    yield served
    served.mailbox.close()


def test_engines_that_follow_one_another_are_each_drafted_for(served: Served) -> None:
    for _ in range(3):
        engine = Engine()
        engine.drafter.attach("it", served.mailbox.address)
        served.turn_until(lambda engine=engine: engine.most > 0, engine)
        assert len(served.engine.streams) == 1, "nothing is left of the engine before"
        engine.drafter.detach("it")
        served.turn_until(lambda: not served.engine.streams)


def test_an_engine_that_vanished_leaves_nothing_to_the_next_one(served: Served) -> None:
    gone = Engine()
    gone.drafter.attach("it", served.mailbox.address)
    served.turn_until(lambda: gone.most > 0, gone)
    (old,) = served.engine.streams.values()
    gone.drafter.links["it"].line.close()  # without a word
    engine = Engine()
    engine.drafter.attach("it", served.mailbox.address)
    served.turn_until(lambda: engine.most > 0, engine)
    (stream,) = served.engine.streams.values()
    assert stream is not old
    engine.drafter.detach("it")


@pytest.mark.nightly
def test_a_thousand_cycles_leave_nothing_behind(served: Served) -> None:
    engine = Engine()

    def cycle() -> None:
        engine.drafter.attach("it", served.mailbox.address)
        served.turn_until(lambda: "0" in engine.drafter.links["it"].requests.open, engine)
        engine.drafter.detach("it")

    before = left_over()
    for _ in range(1000):
        cycle()
    served.turn_until(lambda: not served.engine.streams)
    end = time.monotonic() + PATIENCE_S
    while left_over() != before and time.monotonic() < end:
        time.sleep(0.01)  # sockets send their last words
    assert left_over() == before
    assert not engine.drafter.links and not engine.drafter._dismissed


def left_over() -> tuple[int, list[str], int]:
    """Open files, entries of shared memory, threads."""
    threads = len(os.listdir("/proc/self/task"))
    own = sorted(name for name in os.listdir("/dev/shm") if f"-{os.getpid()}" in name)
    return len(os.listdir("/proc/self/fd")), own, max(threads, threading.active_count())


def test_shared_memory_has_one_guest(tmp_path: Path) -> None:
    served = Served(f"shm://attaching-{os.getpid()}-one")
    first, second = Engine(), Engine()
    first.drafter.attach("it", served.mailbox.address)
    with pytest.raises(MailboxError, match="has a guest already"):
        second.drafter.attach("it", served.mailbox.address)
    assert not second.drafter.links
    first.drafter.detach("it")
    second.drafter.attach("it", served.mailbox.address)
    second.drafter.close()
    served.mailbox.close()


def test_nobody_can_be_attached_where_nobody_serves(tmp_path: Path) -> None:
    left: Mailbox = open_mailbox(f"ipc://{tmp_path}/socket", serve=True)
    left._remove = lambda *_: None  # type: ignore[attr-defined]
    left.close()
    assert (tmp_path / "socket").exists(), "as a killed process leaves it"
    (tmp_path / "file").touch()
    for name in ("socket", "file", "nothing"):
        with pytest.raises(MailboxError, match="nobody serves at"):
            connect(f"ipc://{tmp_path}/{name}")
    with pytest.raises(MailboxError, match="cannot be opened"):
        connect("shm://attaching-nobody")
