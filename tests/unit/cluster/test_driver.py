"""Random schedules of a group's driver over engines that die, come back, and say things late: no answer differs."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.cluster.standin import Engine, answer, token
from vllm_specrollout.cluster.batch import GroupError, RequestChecker
from vllm_specrollout.cluster.driver import Driver
from vllm_specrollout.cluster.ladder import LADDERS, Rules

SCHEDULES = 20 * int(os.environ.get("SPECROLLOUT_SCHEDULES", "1"))


class World:
    """Engines in this process, and all that is on its way between them and the driver, in an order of its own.

    Calls of one engine arrive in their order, and so do its answers; between engines nothing is ordered.
    """

    def __init__(self, count: int, rules: Rules, seed: int = 0, restarts: int = 99, drafter: str = "") -> None:
        self.rng, self.now = random.Random(seed), 0.0
        names = [f"engine-{i}" for i in range(count)]
        self.alive = {name: Engine(self.rng.choice([1, 2, 4])) for name in names}
        self.restarts = dict.fromkeys(names, restarts)
        # engine -> calls on their way there, and answers on their way back
        self.there: dict[str, deque[tuple[Callable[[Any], None] | None, str, tuple[Any, ...]]]] = {
            name: deque() for name in names
        }
        self.back: dict[str, deque[tuple[Callable[[Any], None], str, tuple[Any, ...], Any]]] = {
            name: deque() for name in names
        }
        self.driver = Driver(self, names, rules, lambda: self.now)
        self.driver.equip(rules, [drafter] if drafter else [])

    def call(self, engine: str, then: Callable[[Any], None], method: str, *args: Any) -> None:
        self.there[engine].append((then, method, args))

    def send(self, engine: str, method: str, *args: Any) -> None:
        self.there[engine].append((None, method, args))

    def kill(self, name: str) -> None:
        """What is on its way is lost, but for answers that have left. A next life has the weights of its start."""
        told = self.rng.randrange(3)
        answers, lost = list(self.back[name])[:told], list(self.back[name])[told:]
        # being admitted is asked of the next life as well, where nobody heard of it
        waits = [one for one in (*(own[:3] for own in lost), *self.there[name]) if one[1] == "admit"]
        self.there[name].clear()
        self.back[name].clear()
        for then, _, _, found in answers:
            then(found)
        self.restarts[name] -= 1
        self.back[name].clear()
        self.there[name].clear()
        if waits and self.restarts[name] >= 0 and self.driver.engines[name].version is None:
            self.there[name].extend(waits)  # nothing else was asked of it, and this is asked of its next life
            self.alive[name] = Engine(self.rng.choice([1, 2, 4]))
            return
        if self.restarts[name] >= 0:
            self.alive[name] = Engine(self.rng.choice([1, 2, 4]))
        else:
            del self.alive[name]
        self.driver.lose(name, "killed")
        if name not in self.alive and name in self.driver.engines:
            self.driver.lose(name, "killed")

    def turn(self) -> None:
        """Something happens somewhere."""
        self.now += self.rng.choice([0.01, 0.05, 0.2])
        self.driver.decide()
        name = self.rng.choice(list(self.alive))
        engine = self.alive[name]
        match self.rng.randrange(3):
            case 0:
                engine.step()
            case 1 if self.there[name]:
                then, method, args = self.there[name].popleft()
                if method == "report":
                    found: Any = engine.report()
                else:
                    found = "here" if method == "host" else getattr(engine, method)(*args)
                if then is not None:
                    self.back[name].append((then, method, args, found))
            case 2 if self.back[name]:
                then, _, _, found = self.back[name].popleft()
                then(found)

    def settle(self) -> None:
        while any(one.version != self.driver.wanted.version for one in self.driver.engines.values()):
            self.turn()


def ask(rng: random.Random, count: int) -> dict[str, Any]:
    params = [{"seed": i, "max_tokens": rng.choice([3, 5, 9, 40]), "temperature": 1.0} for i in range(count)]
    return RequestChecker(0).ask([[1, i // 2] for i in range(count)], params)


def finish(world: World, asked: dict[str, Any], each: Callable[[], None] = lambda: None) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    while len(answers) < len(asked):
        each()
        world.turn()
        answers |= world.driver.take_answers([one for one in asked if one not in answers])
    return answers


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_whatever_dies_and_whoever_helps_each_answer_is_one_engines_own(ladder: str, seed: int) -> None:
    rng = random.Random(seed)
    rules = Rules(ladder, rng.choice([1, 2, 4]))
    world = World(rng.choice([1, 2, 3, 5]), rules, seed, drafter="small" if rng.random() < 0.7 else "")
    world.settle()
    asked = ask(rng, rng.choice([1, 4, 9]))
    world.driver.add(asked)
    deaths = rng.choice([0, 1, 3])

    def maybe_kill() -> None:
        nonlocal deaths
        if deaths and rng.random() < 0.02:
            deaths -= 1
            world.kill(rng.choice(list(world.alive)))

    answers = finish(world, asked, maybe_kill)
    for request, found in answers.items():
        assert list(found.token_ids) == answer(asked[request].params), request
        assert found.versions == ((0, 0),)
    assert not world.driver.open and not world.driver.waiting
    # nothing runs on for nobody
    for _ in range(2000):
        world.turn()
    assert not any(engine.live for engine in world.alive.values())
    assert not any(one.running for one in world.driver.engines.values())
    for engine in world.alive.values():
        assert not any(engine.attached.values()), "who drafts for nobody is let go"


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_new_weights_amid_a_batch_give_all_tokens_behind_those_that_had_come(seed: int) -> None:
    rng = random.Random(seed)
    world = World(3, Rules(rng.choice(LADDERS), 2), seed, drafter="small")
    world.settle()
    asked = ask(rng, 6)
    world.driver.add(asked)
    pushes = [rng.randrange(5, 60), rng.randrange(60, 200)]
    turns = 0

    def maybe_push() -> None:
        nonlocal turns
        turns += 1
        if turns in pushes:
            number = world.driver.wanted.version + 1
            world.driver.bring(update=(number, "load", {"number": number}))
        if turns == 30 and rng.random() < 0.5:
            world.kill(rng.choice(list(world.alive)))

    for request, found in finish(world, asked, maybe_push).items():
        params, ends = asked[request].params, [start for start, _ in found.versions[1:]] + [len(found.token_ids)]
        wanted = [
            token(params["seed"], weights, i)
            for (start, weights), end in zip(found.versions, ends, strict=True)
            for i in range(start, end)
        ]
        assert found.versions[0][0] == 0 and list(found.token_ids) == wanted


def test_an_engine_that_comes_back_gets_no_request_before_it_has_the_groups_weights() -> None:
    world = World(2, Rules())
    world.settle()
    world.driver.bring(update=(1, "load", {"number": 1}))
    world.settle()
    world.kill("engine-0")
    asked = ask(world.rng, 4)
    world.driver.add(asked)
    world.driver.decide()
    assert not world.driver.engines["engine-0"].running and world.alive["engine-0"].weights == 0
    for request, found in finish(world, asked).items():
        assert list(found.token_ids) == answer(asked[request].params, weights=1)


def test_siblings_go_to_one_engine_and_others_wait_for_it_while_none_is_idle() -> None:
    world = World(2, Rules())
    for engine in world.alive.values():
        engine.places = 4
    world.settle()
    asked = ask(world.rng, 8)
    world.driver.add(asked)
    world.driver.decide()
    homes: dict[str, set[str]] = {}
    for own in asked.values():
        homes.setdefault(own.problem, set()).add(own.engine)
    assert [len(one) for one in homes.values()] == [1, 1, 1, 1]
    assert [len(one.running) for one in world.driver.engines.values()] == [4, 4]


def test_a_request_that_ends_each_engine_is_given_up_and_named() -> None:
    world = World(2, Rules())
    world.settle()
    asked = ask(world.rng, 1)
    world.driver.add(asked)
    (request,) = asked
    with pytest.raises(GroupError, match=f"request {request} was lost 5 times"):
        while True:
            world.turn()
            world.driver.take_answers(asked)
            for name in [name for name, one in world.driver.engines.items() if one.running]:
                world.kill(name)
    world.driver.drop(asked)
    assert not world.driver.open


def test_a_refused_request_says_why_and_costs_the_others_nothing() -> None:
    world = World(2, Rules())
    world.settle()
    asked = ask(world.rng, 4)
    wrong, *others = asked
    asked[wrong].params["wrong"] = "ValueError: no"
    world.driver.add(asked)
    with pytest.raises(GroupError, match=f"refused request {wrong}: ValueError: no"):
        finish(world, {wrong: asked[wrong]})
    world.driver.drop([wrong])
    found = finish(world, {one: asked[one] for one in others})
    assert all(list(found[one].token_ids) == answer(asked[one].params) for one in others)


def test_without_an_engine_the_batch_fails_and_says_what_the_last_ones_said() -> None:
    world = World(2, Rules(), restarts=0)
    world.settle()
    world.driver.add(ask(world.rng, 3))
    world.kill("engine-0")
    with pytest.raises(GroupError, match="no engine is left: .*engine-1: killed"):
        world.kill("engine-1")
