"""What a group refuses before it begins a process, how it shares cores out, and what it does while a batch runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.cluster.group.builders import FakeEngine, WireHub, truth
from vllm_specrollout.cli.commands import app
from vllm_specrollout.cluster.group import RolloutGroup
from vllm_specrollout.cluster.group.member import BEAT_S, Member
from vllm_specrollout.cluster.group.messages import Call, Message, Run, decode, encode
from vllm_specrollout.cluster.group.processes import shares_of
from vllm_specrollout.errors import ConfigError

HERE = Path(__file__).parents[2]


def bare() -> Any:
    """A group without processes."""
    group = RolloutGroup.__new__(RolloutGroup)
    import random

    group._rng, group._batches = random.Random(0), 0
    return group


def test_every_refusal_reads_as_recorded(snapshot: Any, render_refusals: Any) -> None:
    group = bare()
    cases = {
        "a ladder that does not exist": lambda: RolloutGroup("m", ladder="climb"),
        "no drafter to attach": lambda: RolloutGroup("m", ladder="attach"),
        "a drafter that nobody attaches": lambda: RolloutGroup("m", drafter="d"),
        "drafters without a name": lambda: RolloutGroup("m", ladder="attach", drafter=["d", ""]),
        "plain": lambda: RolloutGroup("m", spec_rollout=False),
        "no cores": lambda: RolloutGroup("m", cores=[[0], []]),
        "no method": lambda: RolloutGroup("m", ladder="race", methods=()),
        "several answers at once": lambda: group._asks([[1]], {"n": 2}),
        "the likeliest tokens": lambda: group._asks([[1]], {"logprobs": 5}),
        "a token id below all": lambda: group._asks([[1], [2, -1]], {}),
        "a token id above all": lambda: group._asks([[1 << 31]], {}),
        "no token id": lambda: group._asks([[1, 2.5]], {}),
        "no list of token ids": lambda: group._asks([3], {}),
        "one for each": lambda: group._asks([[1]], [{}, {}]),
        "an object": lambda: group._asks([[1]], [3]),
        "no JSON": lambda: group._asks([[1]], {"extra_args": {"a": object}}),
    }
    snapshot(HERE / "refusals" / "group.txt", render_refusals(cases))


def test_what_counts_as_a_whole_number_is_told_as_one() -> None:
    (ask,) = bare()._asks([np.array([3, (1 << 31) - 1])], {})
    assert decode(encode(Run(ask.request, ask.prompt, ask.params))) == Run("1-0", (3, (1 << 31) - 1), ask.params)


def test_whoever_samples_gets_a_seed_and_keeps_its_own() -> None:
    asks = bare()._asks([[1], [2], [3]], [{}, {"seed": 5}, {"temperature": 0.0}])
    assert isinstance(asks[0].params["seed"], int)
    assert asks[1].params["seed"] == 5 and "seed" not in asks[2].params
    assert [ask.request for ask in asks] == ["1-0", "1-1", "1-2"]


def test_cores_are_shared_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 4, 5, 6, 7})
    assert shares_of(2) == [[3, 4, 5], [6, 7]]
    assert shares_of([[0], [1, 2]]) == [[0], [1, 2]]
    with pytest.raises(ConfigError, match="`cores` is 6"):
        shares_of(6)


def test_the_command_refuses_an_address_off_the_host() -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["coordinator", "--listen", "tcp://127.0.0.1:1"])
    assert isinstance(result.exception, ConfigError) and "one host" in str(result.exception)


# --- a batch ----------------------------------------------------------------------------------------------------------


class Process:
    """A worker's process, which runs until it is killed."""

    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9

    def wait(self) -> None:
        assert self.returncode is not None


class LiveHub(WireHub):
    """Its workers take a turn whenever somebody listens.

    Args:
        arrives: whether a message reaches its worker.
    """

    def __init__(self, arrives: Callable[[str, Message], bool]) -> None:
        super().__init__()
        self._arrives = arrives
        beats = iter(range(1 << 30))
        self.members = {
            name: Member(FakeEngine(f"w{i}", i), self.wires[name], clock=lambda: next(beats) * BEAT_S)
            for i, name in enumerate(NAMES)
        }
        self.silent: set[str] = set()

    def send(self, worker: str, message: Message) -> None:
        if self._arrives(worker, message):
            super().send(worker, message)

    def receive(self) -> list[tuple[str, Message]]:
        for name in self.members.keys() - self.silent:
            self.members[name].turn()
        return super().receive()


NAMES = ("worker-0", "worker-1")


def running(monkeypatch: pytest.MonkeyPatch, arrives: Callable[[str, Message], bool] = lambda *_: True) -> Any:
    """A group whose workers are here, and whose clock goes on whenever somebody looks at it."""
    group, clock = bare(), iter(range(1 << 30))
    group._hub, group._workers = LiveHub(arrives), {name: Process() for name in NAMES}
    group._coordinator = group._warm = None
    group._heard, group._called, group._call_at, group._patience_s = {}, 0, 0.0, 5.0
    group.places, group.resubmitted, group.disagreements = {}, 0, 0
    monkeypatch.setattr(
        "vllm_specrollout.cluster.group.driver.time", SimpleNamespace(monotonic=lambda: next(clock) * BEAT_S)
    )
    monkeypatch.setattr("vllm_specrollout.cluster.group.driver.wait", lambda *_: None)
    group._await_workers(100.0)
    return group


def test_a_request_that_is_lost_on_its_way_is_answered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"1-0", "1-2"}

    def arrives(_: str, message: Message) -> bool:
        is_lost = isinstance(message, Run) and message.request in lost
        if is_lost:
            lost.remove(message.request)
        return not is_lost

    group = running(monkeypatch, arrives)
    answers = group.generate([[1, 2]] * 3, {"seed": 1})
    assert [one.token_ids for one in answers] == [truth(f"1-{i}") for i in range(3)]
    assert group.resubmitted == 2 and not lost


def test_between_two_batches_nothing_piles_up(monkeypatch: pytest.MonkeyPatch) -> None:
    group = running(monkeypatch)
    group.generate([[1, 2]], {"seed": 1})
    for _ in range(1000):
        for member in group._hub.members.values():
            member.turn()
    waiting = [len(wire.out) for wire in group._hub.wires.values()]
    assert max(waiting) < 5, "the cancelled rest of the batch, and one answer to the last call"
    group.generate([[1, 2]], {"seed": 1})


def test_a_worker_that_says_nothing_is_ended_and_others_get_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    group = running(monkeypatch)
    group._hub.silent.add("worker-1")
    answers = group.generate([[1, 2]] * 4, {"seed": 1})
    assert [one.token_ids for one in answers] == [truth(f"1-{i}") for i in range(4)]
    assert list(group.places) == ["worker-0"] and group.resubmitted > 0


def test_a_driver_that_stood_still_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    group = running(monkeypatch)
    clock = iter(range(1 << 30))
    monkeypatch.setattr(
        "vllm_specrollout.cluster.group.driver.time", SimpleNamespace(monotonic=lambda: next(clock) * 1e4)
    )
    group.generate([[1, 2]] * 4, {"seed": 1})
    assert list(group.places) == list(NAMES)


def test_workers_hear_whether_their_drafters_can_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    group = running(monkeypatch, lambda name, message: heard.append((name, message)) is None)
    group._warm = SimpleNamespace(is_ready=lambda name: name == "worker-1", watch=lambda: [])
    del heard[:]
    group.generate([[1, 2]], {"seed": 1})
    calls = {(name, message.has_drafter) for name, message in heard if isinstance(message, Call)}
    assert calls == {("worker-0", False), ("worker-1", True)}
