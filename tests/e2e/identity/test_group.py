"""The very tokens of stock vLLM from a group of engines, whoever wins a race and whatever dies meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import OURS, engine, model
from tests.unit.cluster.group.builders import World
from vllm_specrollout.cluster.child import Command
from vllm_specrollout.cluster.group import RolloutGroup
from vllm_specrollout.cluster.group.coordinator import Rules
from vllm_specrollout.cluster.group.dealing import Ask
from vllm_specrollout.cluster.group.messages import Link, Message, Progress, Run
from vllm_specrollout.cluster.warm import WarmPool

ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "max_num_seqs": 8}
DRAFTS = {**OURS, "drafters": ["history", "ngram"], "scratch_blocks": 64, "placement": "decoupled"}
SOME = (
    "greedy",
    "temperature 1",
    "all penalties, greedy",
    "repetition penalty",
    "min_tokens",
    "bad words",
    "stop tokens",
)
RULES = Rules(methods=("ngram",), silence_s=1e4)
Truth = tuple[list[Any], list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def path(models: Path) -> str:
    return model(models, "llama", "float32")


@pytest.fixture(scope="module")
def truth(path: str) -> Truth:
    """Requests, the first of them long, and stock's tokens."""
    requests = cases(14, VOCAB, seed=41, max_tokens=20, only=SOME)
    requests[0].params.update(max_tokens=120)
    requests[1].params.update(max_tokens=90)
    requests[7].params.update(max_tokens=90)
    assert requests[7].name == "greedy", "a random model's goes round in circles, which is drafted"
    with engine(path, "float32", is_ours=False, max_num_seqs=8) as stock:
        return requests, [tuple(one.outputs[0].token_ids) for one in run(stock.llm, requests)]


@pytest.fixture(scope="module")
def engines(path: str, truth: Truth) -> Iterator[Callable[[str, int], Any]]:
    """Two engines in this process, handed out as workers' engines; stock's end before, which others would feel."""
    from vllm_specrollout.worker.rollout.engine import RolloutEngine

    made = [RolloutEngine({**ENGINE, "model": path, "spec_rollout": DRAFTS}) for _ in range(2)]
    yield lambda name, seed: made[int(name[1:])]
    for one in made:
        one.close()


def runner(own: Any) -> Any:
    return own.core.model_executor.driver_worker.worker.model_runner


def free_blocks(own: Any) -> int:
    return own.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("winner", ["w0", "w1"])
def test_whoever_wins_a_race_the_tokens_are_stocks_and_the_loser_leaves_nothing(
    engines: Any, truth: Truth, winner: str
) -> None:
    requests, wanted = truth
    world = World([Ask("long", tuple(requests[0].prompt), requests[0].params)], 2, RULES, 1, engines)
    before = [free_blocks(own) for own in world.engines.values()]
    accepted = runner(world.engines[winner]).stats.accepted
    while not any(isinstance(one, Run) and one.is_copy for one in sent(world)):
        world.turn_all()
    loser = {"w0": "w1", "w1": "w0"}[winner]
    world.turn(loser)  # it takes the request, and does a step
    steps = count_steps(world.engines[loser])
    while not world.dealer.is_done:
        world.turn(winner)
        world.turn_driver()
    answer = world.dealer.answers["long"]
    assert (answer.token_ids, answer.worker, answer.copies) == (wanted[0], winner, 2)
    assert steps() == 0
    # the driver has said so, and the loser hears it in its next turn
    world.turn(loser)
    world.turn(loser)
    assert steps() <= 2 and world.members[loser].is_idle
    assert [free_blocks(own) for own in world.engines.values()] == before
    assert world.dealer.disagreements == 0
    assert runner(world.engines[winner]).stats.accepted > accepted


def test_a_freed_worker_drafts_with_the_method_that_it_was_given(engines: Any, truth: Truth) -> None:
    requests, wanted = truth
    world = World([Ask("long", tuple(requests[7].prompt), requests[7].params)], 2, RULES, 1, engines)
    methods, accepted = set(), {name: runner(own).stats.accepted for name, own in world.engines.items()}
    while not world.dealer.is_done:
        world.turn_all()
        methods |= {tuple(one.name for one in own._speculator.drafters) for own in world.engines.values()}
    assert world.dealer.answers["long"].token_ids == wanted[7]
    assert methods == {("history", "ngram", "decoupled"), ("ngram",)}
    assert all(runner(own).stats.accepted > accepted[name] for name, own in world.engines.items())


@pytest.mark.nightly
def test_an_idle_workers_drafter_drafts_for_a_straggler_and_goes_home_when_it_is_needed(
    engines: Any, truth: Truth, path: str, tmp_path: Path
) -> None:
    requests, wanted = truth
    address, arguments = f"ipc://{tmp_path / 'drafter'}", {**ENGINE, "kv_cache_memory_bytes": 1 << 26}
    with WarmPool({"w1": Command(path, address, arguments)}) as pool:
        while not pool.is_ready("w1"):
            assert not pool.watch()
            time.sleep(0.05)
        asks = [Ask(name, tuple(requests[i].prompt), requests[i].params) for i, name in enumerate(("long", "next"))]
        world = World(asks[:1], 2, Rules(mode="attach", silence_s=1e4), 1, engines)
        lender, straggler = world.engines["w1"], world.engines["w0"]
        lender.drafter = address
        try:
            while not straggler.links():
                world.turn_all()
            assert straggler.links() == [Link("w1", ("long",))]
            # told again, with another request: it is the same drafter, for these two
            straggler.attach("w1", address, ["long", "other"])
            assert state(straggler)["w1"]["request_ids"] == ["long", "other"]
            # the drafter is the target itself: once it has answered, what it drafts is met
            while not state(straggler)["w1"]["matched"]:
                assert not world.dealer.is_done
                world.turn("w0")
                await_drafts(straggler)
            # its own worker gets a request: the drafter leaves its cores
            world.driver.send("w1", Run("next", asks[1].prompt, asks[1].params))
            while straggler.links():
                world.turn_all()
            assert state(straggler) == {} and pool.is_ready("w1"), "it stays warm"
            while not world.dealer.is_done or not world.members["w1"].is_idle:
                world.turn_all()
        finally:
            lender.drafter = ""
        assert world.dealer.answers["long"].token_ids == wanted[0]


def await_drafts(own: Any) -> None:
    """Stand still until the drafter has caught up: how fast it is says something of the host alone."""
    before, remote = state(own)["w1"]["trees"], runner(own).remote
    for _ in range(500):
        remote.receive()
        if state(own)["w1"]["trees"] > before:
            return
        time.sleep(0.01)


def state(own: Any) -> dict[str, Any]:
    return own.llm.collective_rpc("drafters_state")[0]


def sent(world: World) -> list[Message]:
    from vllm_specrollout.cluster.group.messages import decode

    return [decode(data) for wire in world.driver.wires.values() for data in wire.to_come]


def count_steps(own: Any) -> Callable[[], int]:
    begin = own.core.scheduler._step
    return lambda: own.core.scheduler._step - begin


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group(path: str) -> Iterator[RolloutGroup]:
    own = sorted(os.sched_getaffinity(0))
    settings = {**ENGINE, "kv_cache_memory_bytes": 1 << 27}
    with RolloutGroup(path, cores=[own[:1], own[-1:]], engine=settings, spec_rollout=DRAFTS, ladder="race") as one:
        yield one


def ask(group: RolloutGroup, truth: Truth) -> list[tuple[int, ...]]:
    """The tokens of all answers, to which steps that accepted drafts have added."""
    requests, _ = truth
    receive, most = group._hub.receive, [0]

    def seen() -> list[tuple[str, Message]]:
        messages = receive()
        pieces = [piece for _, one in messages if isinstance(one, Progress) for piece in one.pieces]
        most.extend(len(piece.tokens) for piece in pieces)
        return messages

    group._hub.receive = seen  # type: ignore[method-assign]
    try:
        answers = group.generate([case.prompt for case in requests], [case.params for case in requests])
    finally:
        group._hub.receive = receive  # type: ignore[method-assign]
    assert max(most) > 1, "a step adds one token and what it accepts"
    return [answer.token_ids for answer in answers]


def after(group: RolloutGroup, count: int, what: Callable[[], None], lost: str = "") -> None:
    """Do something once workers have told of so many steps, and let nothing more come of the one that is lost by it.

    Messages come one by one, so that it is mid-batch however late the driver looks.
    """
    receive, told = group._hub.receive, 0
    waiting: list[tuple[str, Message]] = []

    def one_by_one() -> list[tuple[str, Message]]:
        nonlocal told
        waiting.extend(receive())
        if told >= count:
            waiting[:] = [one for one in waiting if one[0] != lost]
        if not waiting:
            return []
        taken = waiting.pop(0)
        if isinstance(taken[1], Progress) and (not lost or taken[0] == lost):
            told += 1
            if told == count:
                what()
        return [taken]

    group._hub.receive = one_by_one  # type: ignore[method-assign]


@pytest.mark.nightly
def test_a_coordinator_killed_mid_batch_costs_no_token_and_comes_back(group: RolloutGroup, truth: Truth) -> None:
    coordinator = group._coordinator
    assert coordinator is not None
    before = coordinator.process
    after(group, 10, before.kill)
    assert ask(group, truth) == truth[1]
    del group._hub.receive
    assert before.wait() == -signal.SIGKILL
    while coordinator.process is before:
        assert ask(group, truth) == truth[1]
    assert coordinator.process.poll() is None


@pytest.mark.nightly
def test_requests_of_a_worker_killed_mid_batch_go_on_elsewhere(group: RolloutGroup, truth: Truth) -> None:
    after(group, 1, group._workers["worker-1"].kill, lost="worker-1")
    assert ask(group, truth) == truth[1]
    del group._hub.receive
    # given again, or raced for by the other one already: that is a matter of clocks
    assert list(group.places) == ["worker-0"]
    assert group.disagreements == 0
