"""Random schedules of a group's driver over engines that die, come back, and say things late: no answer differs."""

import asyncio
import os
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.unit.cluster.standin import Engine, answer, token
from vllm_specrollout.cluster import driver
from vllm_specrollout.cluster.batch import GroupAnswer, GroupError, Open, RequestChecker
from vllm_specrollout.cluster.driver import BEHIND, Driver, EngineLost
from vllm_specrollout.cluster.transfer import Transfer
from vllm_specrollout.errors import ConfigError, SpecRolloutError

SCHEDULES = 20 * int(os.environ.get("SPECROLLOUT_SCHEDULES", "1"))
MOST_TURNS = 30000
"""Of a schedule, after which it counts as hanging."""
Call = tuple[asyncio.Future[Any] | None, str, tuple[Any, ...]]


pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Unhurried(Driver):
    """Its beats are the schedule's."""

    async def _beats(self) -> None:
        pass


class World:
    """Engines in this process, and all that is on its way between them and the driver, in an order of its own.

    Calls of one engine arrive in their order, and so do its answers; between engines nothing is ordered.
    """

    def __init__(self, count: int, ladder: str = "off", seed: int = 0, restarts: int = 99) -> None:
        self.rng, self.now, self.turns = random.Random(seed), 0.0, 0
        names = [f"engine-{i}" for i in range(count)]
        self.alive = {name: Engine(self.rng.choice([1, 2, 4])) for name in names}
        self.restarts = dict.fromkeys(names, restarts)
        # engine -> calls on their way there, and answers on their way back
        self.there: dict[str, deque[Call]] = {name: deque() for name in names}
        self.back: dict[str, deque[tuple[Call, Any]]] = {name: deque() for name in names}
        self.driver = Unhurried(self, names, ladder, clock=lambda: self.now)
        # engine whose death nobody has heard of yet -> whether it met no call, so that the next one meets it
        self.unnoticed: dict[str, bool] = {}
        self.asking, self.found = RequestChecker(0), dict[str, GroupAnswer | GroupError]()
        self.transfer = Transfer(self.driver, self, 1, "", lambda what: what)
        self.driver.start()

    # --- as lines -----------------------------------------------------------------------------------------------------

    def call(self, engine: str, method: str, *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        is_lost = engine not in self.alive or (self.unnoticed.pop(engine, False) and method != "admit")
        if is_lost:
            future.set_exception(EngineLost("killed"))
        else:
            self.there[engine].append((future, method, args))
        return future

    def send(self, engine: str, method: str, *args: Any) -> None:
        if engine in self.alive and engine not in self.unnoticed:
            self.there[engine].append((None, method, args))

    def end(self, engine: str) -> None:
        self.kill(engine)

    # --- as the world -------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """What is on its way is lost, but for answers that have left. A next life has the weights of its start."""
        told = self.rng.randrange(3)
        for call, found in list(self.back[name])[:told]:
            _tell(call, found)
        lost = [*(call for call, _ in list(self.back[name])[told:]), *self.there[name]]
        self.there[name].clear()
        self.back[name].clear()
        self.restarts[name] -= 1
        if self.restarts[name] >= 0:
            self.alive[name] = Engine(self.rng.choice([1, 2, 4]))
        else:
            del self.alive[name]
        if not any(method == "admit" for _, method, _ in lost):
            self.unnoticed[name] = not any(future is not None for future, _, _ in lost)
        for call in lost:
            # being admitted is asked of the next life as well
            if call[1] == "admit" and name in self.alive:
                self.there[name].append(call)
            else:
                _tell(call, EngineLost("killed"))

    async def turn(self) -> None:
        """Something happens somewhere."""
        self.turns += 1
        assert self.turns < MOST_TURNS, "it hangs"
        self.now += self.rng.choice([0.01, 0.05, 0.2])
        if self.alive:
            name = self.rng.choice(list(self.alive))
            match self.rng.randrange(4):
                case 0:
                    self.driver.beat()
                case 1:
                    self.alive[name].step()
                case 2 if self.there[name]:
                    call = self.there[name].popleft()
                    self.back[name].append((call, _done(self.alive[name], call)))
                case 3 if self.back[name]:
                    _tell(*self.back[name].popleft())
        for _ in range(3):  # whoever was told goes on
            await asyncio.sleep(0)

    async def settle(self) -> None:
        while any(one.version != self.driver.wanted.version for one in self.driver.engines.values()):
            await self.turn()

    async def until(self, what: Coroutine[Any, Any, Any]) -> Any:
        """What a call of the driver's owner comes to."""
        task = asyncio.ensure_future(what)
        while not task.done():
            await self.turn()
        return task.result()

    def ask(self, count: int, **more: Any) -> dict[str, Open]:
        lengths = [self.rng.choice([3, 5, 9, 40]) for _ in range(count)]
        params = [{"seed": i, "max_tokens": length, **more} for i, length in enumerate(lengths)]
        asked = self.asking.ask([[1, i // 2] for i in range(count)], params, sink=self.found.__setitem__)
        self.driver.add(asked)
        return asked

    async def finish(self, asked: dict[str, Open], each: Callable[[], None] = lambda: None) -> dict[str, GroupAnswer]:
        while not all(request in self.found for request in asked):
            each()
            await self.turn()
        answers = {}
        for request in asked:
            found = self.found[request]
            if isinstance(found, GroupError):
                raise found
            answers[request] = found
        return answers


def _done(engine: Engine, call: Call) -> Any:
    try:
        return getattr(engine, call[1])(*call[2])
    except SpecRolloutError as error:
        return error


def _tell(call: Call, found: Any) -> None:
    if (future := call[0]) is None or future.done():
        return
    if isinstance(found, Exception):
        future.set_exception(found)
    else:
        future.set_result(found)


async def settled(*args: Any, **given: Any) -> World:
    """Each engine of it is admitted."""
    world = World(*args, **given)
    await world.settle()
    return world


def expected(own: Open, found: GroupAnswer, weights: dict[int, int] | None = None) -> list[int]:
    """Its tokens, each by the weights that the answer names for it: those of its version's number, or of a table."""
    assert found.versions[0][0] == 0
    ends = [start for start, _ in found.versions[1:]] + [own.params["max_tokens"]]
    out = []
    for (start, version), end in zip(found.versions, ends, strict=True):
        number = version if weights is None else weights[version]
        out += [token(own.params["seed"], number, i) for i in range(start, end)]
    return out


@pytest.mark.parametrize("ladder", ["off", "move"])
@pytest.mark.parametrize("seed", range(SCHEDULES))
async def test_whatever_dies_is_pushed_or_cannot_be_resumed_each_token_is_the_named_weights_own(ladder, seed) -> None:
    rng = random.Random(seed)
    world = await settled(rng.choice([1, 2, 3, 5]), ladder, seed)
    asked = world.ask(rng.choice([1, 4, 9]), **({"stop": ["x"]} if rng.random() < 0.3 else {}))
    deaths, pushes = rng.choice([0, 1, 3]), rng.choice([0, 0, 2])
    tasks = []

    def meddle() -> None:
        nonlocal deaths, pushes
        if deaths and rng.random() < 0.02:
            deaths -= 1
            world.kill(rng.choice(list(world.alive)))
        if pushes and rng.random() < 0.02:
            pushes -= 1
            number = world.driver.wanted.version + 1
            tasks.append(asyncio.ensure_future(world.driver.bring(update=(number, "load", {"number": number}))))

    for request, found in (await world.finish(asked, meddle)).items():
        assert list(found.token_ids) == expected(asked[request], found)
        assert "stop" not in asked[request].params or len(found.versions) == 1, "it began anew"
    assert not world.driver.open and not world.driver.waiting
    # nothing runs on for nobody, and nobody waits for ever
    for task in tasks:
        await world.until(asyncio.wait_for(task, None))
    for _ in range(500):
        await world.turn()
    assert not any(engine.live for engine in world.alive.values())
    assert not any(one.running for one in world.driver.engines.values())


@pytest.mark.parametrize("seed", range(SCHEDULES))
async def test_weights_that_a_transfer_brings_reach_all_and_who_dies_meanwhile_has_the_paths(seed: int) -> None:
    rng = random.Random(seed)
    world = await settled(3, rng.choice(["off", "move"]), seed)
    asked, transfer, weights = world.ask(9), world.transfer, {0: 0}
    for number in (1, 2):
        for _ in range(rng.randrange(40)):
            await world.turn()
        await world.settle()
        await world.until(transfer._init({"rank_offset": 1}))
        transfer.path, before = str(number), weights[world.driver.wanted.version]
        await world.until(transfer._start())
        if rng.random() < 0.5:
            world.kill(rng.choice(list(world.alive)))
        await world.until(transfer._update({"number": number}))
        is_given_up = rng.random() < 0.3
        await world.until(transfer._abandon() if is_given_up else transfer._finish())
        weights[world.driver.wanted.version] = before if is_given_up else number
    for request, found in (await world.finish(asked)).items():
        assert list(found.token_ids) == expected(asked[request], found, weights)


async def test_without_a_path_who_is_begun_anew_after_a_transfer_stays_behind_and_the_batch_ends_when_all_are() -> None:
    world = await settled(2)
    calls = world.transfer
    for call in (calls._init({}), calls._start(), calls._update({"number": 1}), calls._finish()):
        await world.until(call)
    world.kill("engine-0")
    asked = world.ask(4)
    for request, found in (await world.finish(asked)).items():
        assert list(found.token_ids) == answer(asked[request].params, weights=1) and found.engine == "engine-1"
    while world.driver.engines["engine-0"].version != BEHIND:
        await world.turn()
    world.kill("engine-1")
    with pytest.raises(GroupError, match="no engine can follow: engine-0: it cannot have what a transfer brought"):
        await world.finish(world.ask(2))
    with pytest.raises(GroupError, match="2 of 2 engines could not follow"):
        await world.until(world.driver.bring(update=(9, "nonsense", {})))
    await world.until(world.driver.bring(update=(9, "load", {"number": 9})))
    assert len(await world.finish(world.ask(2))) == 2


async def test_a_transfers_calls_have_an_order_and_each_engine_its_ranks() -> None:
    world = await settled(2)
    with pytest.raises(GroupError, match="no engine takes part"):
        await world.until(world.transfer._start())
    with pytest.raises(GroupError, match="no transfer is under way"):
        await world.until(world.transfer._finish())
    with pytest.raises(ConfigError, match="has 3 entries for 2 engines"):
        await world.until(world.transfer._init([{}] * 3))
    await world.until(Transfer(world.driver, world, 2, "", lambda what: what)._init({"rank_offset": 1}))
    assert [engine.met["rank_offset"] for engine in world.alive.values()] == [1, 3]
    await world.until(world.transfer._init([{"a": 1}, {"a": 2}]))
    await world.until(world.transfer._start())
    with pytest.raises(GroupError, match="a transfer is under way"):
        await world.until(world.transfer._start())
    with pytest.raises(ConfigError, match="has 1 entries for 2 engines of 1 workers"):
        await world.until(world.transfer._update([{"number": 1}]))
    await world.until(world.transfer._update([{"number": 1}, {"number": 1}]))
    await world.until(world.transfer._finish())
    assert {engine.weights for engine in world.alive.values()} == {1}


async def test_siblings_go_to_one_engine_whose_home_is_remembered_of_so_many_problems(monkeypatch: Any) -> None:
    monkeypatch.setattr(driver, "MOST_PROBLEMS", 3)
    world = World(2)
    for engine in world.alive.values():
        engine.places = 4
    await world.settle()
    asked = world.ask(8)
    world.driver.beat()
    homes: dict[str, set[str]] = {}
    for own in asked.values():
        homes.setdefault(own.problem, set()).add(own.engine)
    assert [len(one) for one in homes.values()] == [1, 1, 1, 1]
    assert [len(one.running) for one in world.driver.engines.values()] == [4, 4]
    assert list(world.driver._homes) == list(homes)[1:]


async def test_a_request_that_ends_each_engine_is_given_up_and_named() -> None:
    world = await settled(2)
    asked = world.ask(1)

    def kill() -> None:
        for name in [name for name, one in world.driver.engines.items() if one.running]:
            world.kill(name)

    with pytest.raises(GroupError, match="request 1-0 was lost 5 times"):
        await world.finish(asked, kill)
    assert not world.driver.open


async def test_a_refused_request_says_why_and_costs_the_others_nothing() -> None:
    world = await settled(2)
    asked = world.ask(4)
    wrong, *others = asked
    asked[wrong].params["wrong"] = "ValueError: no"
    with pytest.raises(GroupError, match=f"refused request {wrong}: ValueError: no"):
        await world.finish({wrong: asked[wrong]})
    found = await world.finish({one: asked[one] for one in others})
    assert all(list(found[one].token_ids) == answer(asked[one].params) for one in others)


async def test_without_an_engine_or_after_the_end_all_that_waits_ends_with_the_cause() -> None:
    world = await settled(2, restarts=0)
    asked = world.ask(3)
    world.kill("engine-0")
    world.kill("engine-1")
    with pytest.raises(GroupError, match="no engine is left: .*engine-1: killed"):
        await world.finish(asked)
    with pytest.raises(GroupError, match="no engine is left"):
        world.ask(1)
    world = await settled(2)
    asked, push = world.ask(3), asyncio.ensure_future(world.driver.bring(update=(1, "load", {"number": 1})))
    await asyncio.sleep(0)
    world.driver.stop(GroupError("the group is closed", ""))
    for waits in (world.finish(asked), world.until(push)):
        with pytest.raises(GroupError, match="the group is closed"):
            await waits
