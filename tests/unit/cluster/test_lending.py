"""Drafters that are lent between engines of a trainer: whatever fails, each request is drafted for as it may be."""

import logging
import random
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from tests.waiting import until
from vllm_specrollout.cluster.lending import LENT, PATIENCE_S, Lending
from vllm_specrollout.errors import ConfigError


class Fake:
    """An engine's workers, as `worker.calls` answers: the second rank says nothing."""

    def __init__(self, running: Sequence[str] = (), drafter: bool = True) -> None:
        self.name = ""
        self.running = {request: [5, 0] for request in running}
        self.steps, self.accepted = 0, 0
        self.model, self.is_drafting = ("small" if drafter else ""), drafter
        # link -> (address, requests)
        self.attached: dict[str, tuple[str, list[str]]] = {"of its own": ("ipc://own", [])}
        self.calls: list[str] = []
        self.refusals: dict[str, str] = {}
        self.failure = ""
        # calls that are not answered yet; None: each is at once
        self.held: list[tuple[Future[Any], str, tuple[Any, ...]]] | None = None

    def ask(self, method: str, args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        if self.held is None:
            self.answer(future, method, args)
        else:
            self.held.append((future, method, args))
        return future

    def answer(self, future: Future[Any], method: str, args: tuple[Any, ...]) -> None:
        self.calls.append(method)
        if self.failure:
            future.set_exception(RuntimeError(self.failure))
        elif method in self.refusals:
            wrong = {"cause": self.refusals[method], "hint": "do otherwise"} if self.refusals[method] else {}
            future.set_result([wrong, {}])
        else:
            future.set_result([getattr(self, method)(*args), {}])

    def release(self) -> None:
        held, self.held = self.held or [], None
        for one in held:
            self.answer(*one)

    def step(self) -> None:
        self.steps += bool(self.running)
        for own in self.running.values():
            own[1] += 1

    @property
    def borrowed(self) -> dict[str, list[str]]:
        """Lender -> requests."""
        lent = {name: requests for name, (_, requests) in self.attached.items() if name.startswith(LENT)}
        return {name.removeprefix(LENT): requests for name, requests in lent.items()}

    def spec_rollout_standing(self) -> dict[str, Any]:
        return {
            "running": {request: tuple(own) for request, own in self.running.items()},
            "steps": self.steps,
            "places": 8,
            "host": "here",
            "drafter": f"ipc://{self.name}" if self.is_drafting else "",
            "model": self.model,
            "attached": {name: sorted(requests) for name, (_, requests) in self.attached.items()},
            "verified": 2 * self.accepted,
            "accepted": self.accepted,
        }

    def spec_rollout_warm(self, model: str, devices: list[str], engine_args: dict[str, Any]) -> dict[str, Any]:
        assert not self.model, "asked once"
        self.model, self.is_drafting = model, True
        return {"model": model}

    def attach_drafter(self, name: str, address: str, window: None, fan_out: None, requests: list[str]) -> Any:
        assert name not in self.attached and requests
        self.attached[name] = (address, requests)
        return {"is_there": False}

    def assign_drafter(self, name: str, requests: list[str]) -> dict[str, Any]:
        self.attached[name] = (self.attached[name][0], requests)
        return {"is_there": True}

    def detach_drafter(self, name: str) -> dict[str, Any]:
        if self.attached.pop(name, None) is None:
            return {"cause": f"no drafter `{name}` is attached", "hint": "attached are: none"}
        return {"is_there": True}


class Stage:
    def __init__(self, engines: dict[str, Fake], **given: Any) -> None:
        self.now = 0.0
        self.engines = engines
        for name, one in engines.items():
            one.name = name
        self.lending = Lending({name: one.ask for name, one in engines.items()}, clock=lambda: self.now, **given)

    def beats(self, count: int = 5) -> None:
        """So many that all is carried out."""
        for _ in range(count):
            self.now += 0.5
            for one in self.engines.values():
                one.step()
            self.lending.beat()


def test_an_idle_engines_drafter_is_lent_to_the_stragglers_of_another() -> None:
    busy, idle = Fake(["r1", "r2"]), Fake()
    stage = Stage({"a": busy, "b": idle})
    stage.beats()
    assert busy.attached[f"{LENT}b"] == ("ipc://b", ["r1", "r2"]) and not idle.borrowed
    assert "of its own" in busy.attached
    stage.beats()
    assert busy.calls.count("attach_drafter") == 1 == stage.lending.lent
    assert stage.lending.status()["engines"]["a"]["borrowed"] == {"b": 2}


@pytest.mark.parametrize("way", ["its engine gets work", "it dies", "it is refused"])
def test_a_drafter_that_cannot_be_lent_is_taken_back_and_lent_again_once_it_can(way: str) -> None:
    busy, idle = Fake(["r1"]), Fake()
    stage = Stage({"a": busy, "b": idle})
    stage.beats()
    if way == "its engine gets work":
        idle.running["own"] = [3, 0]
    elif way == "it dies":
        idle.is_drafting = False
    else:
        busy.attached.popitem()
        busy.refusals["attach_drafter"] = "nobody serves there"
    stage.beats()
    assert not busy.borrowed
    idle.running.clear()
    busy.refusals.clear()
    idle.is_drafting = True
    stage.beats()
    assert busy.borrowed == {"b": ["r1"]} and stage.lending.lent > 1


def test_the_slowest_requests_come_first() -> None:
    busy, idle = Fake(["fast", "slow"]), Fake(drafter=False)
    # it came before anybody asked: how fast it was then is not known
    busy.running["slow"][1] = 1000
    stage = Stage({"a": busy, "b": idle}, most=1)
    for _ in range(4):
        stage.beats(1)
        busy.running["fast"][1] += 5
    idle.model, idle.is_drafting = "small", True
    stage.beats()
    assert busy.borrowed == {"b": ["slow"]}


@pytest.mark.parametrize("way", ["raises", "hangs", "says nothing", "is removed"])
def test_an_engine_that_fails_is_left_out_and_what_it_lent_is_taken_back(way, caplog) -> None:
    busy, failing, other = Fake(["r1"]), Fake(), Fake(["r2"])
    stage = Stage({"a": busy, "b": failing, "c": other})
    stage.beats()
    assert busy.borrowed == {"b": ["r1"]} and other.borrowed == {"b": ["r2"]}
    with caplog.at_level(logging.WARNING, "vllm.specrollout"):
        if way == "raises":
            for failing.failure in ("the actor died", "", "the actor died"):
                stage.beats()
        elif way == "says nothing":
            failing.refusals["spec_rollout_standing"] = ""
            stage.beats()
        elif way == "hangs":
            failing.held = []
            stage.beats(int(PATIENCE_S / 0.5) + 5)
            assert len(failing.held) == 1, "one call at a time"
        else:
            stage.lending.remove(["b"])
            stage.beats()
    assert not busy.borrowed and not other.borrowed
    assert len(caplog.messages) == (way != "is removed"), "said once"
    if way == "is removed":
        stage.lending.add({"b": failing.ask})
    failing.failure = ""
    failing.refusals.clear()
    failing.release()
    stage.beats()
    assert busy.borrowed == {"b": ["r1"]}, "it is back"
    assert not stage.lending.status()["engines"]["b"]["wrong"]


def test_each_engine_begins_the_drafter_that_is_named_unless_it_has_one() -> None:
    busy, idle = Fake(["r1"], drafter=False), Fake()
    stage = Stage({"a": busy, "b": idle}, drafter="tiny", devices=["cpu:0"], drafter_engine={"dtype": "float32"})
    stage.beats()
    assert (busy.model, idle.model) == ("tiny", "small")
    assert busy.calls.count("spec_rollout_warm") == 1 and "spec_rollout_warm" not in idle.calls


def test_what_an_engine_refuses_is_said_once_and_asked_again_only_where_that_may_help(caplog) -> None:
    coupled, cannot = Fake(["r1"]), Fake(drafter=False)
    coupled.refusals["spec_rollout_standing"] = "its `placement` is `coupled`"
    cannot.refusals["spec_rollout_warm"] = "no such model"
    stage = Stage({"a": coupled, "b": cannot}, drafter="tiny")
    with caplog.at_level(logging.WARNING, "vllm.specrollout"):
        stage.beats(10)
    assert cannot.calls.count("spec_rollout_warm") == 1
    assert sorted(message.partition("engine ")[2] for message in caplog.messages) == [
        "a: its `placement` is `coupled`; do otherwise",
        "b: no such model; do otherwise",
    ]
    engines = stage.lending.status()["engines"]
    assert not engines["a"]["is_heard"] and engines["b"]["is_heard"] and "no such model" in engines["b"]["wrong"]
    coupled.refusals.clear()
    stage.beats()
    assert stage.lending.status()["engines"]["a"]["is_heard"]


def test_nodes_are_summed_over_engines_and_closing_takes_back_what_is_lent() -> None:
    busy, idle, other = Fake(["r1"]), Fake(), Fake(["r2"])
    busy.accepted, other.accepted = 3, 4
    stage = Stage({"a": busy, "b": idle, "c": other})
    stage.beats()
    status = stage.lending.status()
    assert (status["verified_nodes"], status["accepted_nodes"]) == (14, 7)
    stage.lending.beat(is_lent=False)
    stage.beats(1)
    stage.lending.close()
    assert not busy.borrowed and list(busy.attached) == ["of its own"]


def test_a_thread_looks_until_it_is_closed() -> None:
    busy, idle = Fake(["r1"]), Fake()
    lending = Stage({"a": busy, "b": idle}).lending
    lending.start()
    until(lambda: busy.borrowed)
    lending.close()
    assert lending._thread is not None
    lending._thread.join(60.0)
    assert not lending._thread.is_alive() and not busy.borrowed


def test_a_drafter_is_lent_to_one_request_at_least() -> None:
    with pytest.raises(ConfigError, match="`most` is 0"):
        Lending({}, most=0)


# the last one has a drafter assigned to others while it could be lent to them
@pytest.mark.parametrize("seed", [*range(40), 1207])
def test_whatever_happens_all_is_lent_in_the_end_as_it_should_be(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"engine-{i}" for i in range(rng.choice([2, 3, 5]))]
    stage = Stage({name: Fake() for name in names}, drafter="small", most=rng.choice([1, 2, 4]))
    for number in range(120):
        one = stage.engines[rng.choice(names)]
        match rng.randrange(7):
            case 0:
                one.running[f"r{number}"] = [5, 0]
            case 1 if one.running:
                del one.running[rng.choice(list(one.running))]
            case 2:
                one.is_drafting = not one.is_drafting
            case 3:
                one.failure = rng.choice(["", "", "it failed"])
            case 4 if one.held is None:
                one.held = []
            case 5:
                one.release()
            case 6:
                one.refusals = rng.choice([{}, {}, {"attach_drafter": "no"}, {"spec_rollout_standing": "no"}])
        stage.beats(1)
    for one in stage.engines.values():
        one.failure, one.refusals, one.is_drafting = "", {}, True
        one.release()
    stage.beats(12)
    idle = {name for name, one in stage.engines.items() if not one.running}
    served: dict[str, list[str]] = {name: [] for name in idle}
    for one in stage.engines.values():
        for lender, requests in one.borrowed.items():
            assert lender in idle, "an engine that works lends nothing"
            served[lender] += [request for request in requests if request in one.running]
    most = stage.lending._most
    running = sum(len(one.running) for one in stage.engines.values())
    assert all(len(requests) <= most for requests in served.values())
    # a second drafter of one model brings a request nothing
    assert sum(map(len, served.values())) == min(running, most * len(idle))
    assert all("of its own" in one.attached for one in stage.engines.values())
