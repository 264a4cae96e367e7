"""Whatever dies and whenever, no request is lost, and the answers are the same."""

from __future__ import annotations

import pytest

from tests.unit.cluster.group.builders import World, truth
from vllm_specrollout.cluster.group.coordinator import Coordinator, Rules
from vllm_specrollout.cluster.group.dealing import MOST_RUNS, GroupError

REQUESTS = [f"r{i}" for i in range(12)]
MODES = ("race", "attach")


def mischief(world: World) -> None:
    """One thing that may happen at any time."""
    rng = world.rng
    what = rng.choices(
        ["turn", "driver", "coordinator", "kill", "hire", "end", "begin", "lose", "lose one", "drafter"],
        [60, 20, 15, 1, 1, 2, 3, 1, 1, 1],
    )[0]
    match what:
        case "turn":
            world.turn(rng.choice(list(world.members)))
        case "driver":
            world.turn_driver()
            if rng.random() < 0.5:
                world.notice()
        case "coordinator":
            world.turn_coordinator()
        case "kill" if len(world.members) > 1:
            world.kill(rng.choice(list(world.members)))
        case "hire" if len(world.members) < 4:
            world.hire()
        case "end":
            world.coordinator = None
        case "begin" if world.coordinator is None:
            # what was said to the last one is lost
            world.commands.receive()
            world.coordinator = Coordinator(world.rules)
        case "lose":
            # what a coordinator says or hears may be lost at any time
            world.commands.receive()
            for wire in world.commands.wires.values():
                wire.to_come.clear()
        case "lose one":
            world.lose_one()
        case "drafter":
            world.without_drafter ^= {rng.choice(list(world.members))}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_no_request_is_lost_and_every_answer_is_the_same(mode: str, first: int) -> None:
    for seed in range(first, first + 20):
        world = World(REQUESTS, workers=3, rules=Rules(mode=mode, most=2, silence_s=2.0), seed=seed)
        for _ in range(20_000):
            if world.dealer.is_done:
                break
            mischief(world)
        else:
            # all that may die has died: what is left goes on by itself
            world.notice()
            world.turn_all(500)
        assert {name: one.token_ids for name, one in world.dealer.answers.items()} == {r: truth(r) for r in REQUESTS}
        assert world.dealer.disagreements == 0
        world.send(world.dealer.leave())
        world.turn_all()
        assert not any(world.engines[name].held for name in world.members), "what was given up is still held"


def test_faults_do_what_they_say() -> None:
    """The schedules above reach what they are for: work that is done again, and copies that end first."""
    resubmitted = copies = won = 0
    for seed in range(40):
        world = World(REQUESTS, workers=3, rules=Rules(most=2, silence_s=2.0), seed=seed)
        while not world.dealer.is_done:
            mischief(world)
        resubmitted += world.dealer.resubmitted
        copies += sum(answer.copies > 1 for answer in world.dealer.answers.values())
        won += len({answer.worker for answer in world.dealer.answers.values()})
    assert resubmitted > 20 and copies > 20 and won > 80


def test_whatever_the_driver_and_its_workers_do_not_hear_of_each_other_no_request_is_stuck() -> None:
    lost = 0
    for seed in range(60):
        world = World(REQUESTS, workers=2, rules=Rules(), seed=seed)
        for _ in range(400):
            if world.dealer.is_done:
                break
            if world.rng.random() < 0.2:
                world.lose_one()
            world.turn_all()
        assert {name: one.token_ids for name, one in world.dealer.answers.items()} == {r: truth(r) for r in REQUESTS}
        lost += world.dealer.resubmitted
        world.send(world.dealer.leave())
        world.turn_all()
        assert not any(engine.held for engine in world.engines.values())
    assert lost > 30


def test_without_a_coordinator_workers_go_on_with_what_they_have() -> None:
    world = World(REQUESTS, workers=2, rules=Rules(), seed=1)
    world.coordinator = None
    world.turn_all(200)
    assert world.dealer.is_done
    assert all(answer.copies == 1 for answer in world.dealer.answers.values())


def test_a_lent_drafter_that_dies_is_let_go_and_an_idle_workers_of_the_same_model_is_lent() -> None:
    world = World(["r7"], workers=5, rules=Rules(mode="attach"), seed=1)
    world.without_drafter = {"w1"}
    straggler = world.engines["w0"]
    straggler.step = lambda: ()
    lent = []
    for dead in ("w1", "w2", "w1"):
        # of the even ones' model, whose turn it is; `w0` has the request itself
        world.without_drafter = {dead, "w1", "w3"}
        world.turn_all(20)
        lent.append([link.drafter for link in straggler.links()])
    assert lent == [["w2"], ["w4"], ["w4"]]


@pytest.mark.parametrize("mode", MODES)
def test_a_coordinator_that_begins_anew_knows_all_after_one_round(mode: str) -> None:
    def helped(rounds: int) -> tuple[int, World]:
        world = World(["r1", "r2", "r3", "r4"], workers=4, rules=Rules(mode=mode, most=1), seed=3)
        world.turn_all(2)
        world.coordinator = None
        world.turn_all(rounds)
        world.coordinator = Coordinator(world.rules)
        world.turn_all(1)
        return len(world.coordinator.workers), world

    known, world = helped(2)
    assert known == 4 == len(world.members)


def test_the_loser_is_cancelled_before_its_second_step() -> None:
    cancelled = 0
    for seed in range(30):
        world = World(["r1", "r2"], workers=3, rules=Rules(methods=("ngram",), most=2), seed=seed)
        steps_at_end: dict[str, dict[str, int]] = {}
        for _ in range(200):
            world.turn_all()
            for request in world.dealer.answers:
                steps_at_end.setdefault(request, {name: engine.steps for name, engine in world.engines.items()})
            if world.dealer.is_done:
                break
        world.turn_all(2)
        for name, engine in world.engines.items():
            assert not engine.held
            for request, step in engine.aborted_at.items():
                assert step - steps_at_end[request][name] <= 1
                cancelled += 1
    assert cancelled > 10


def test_an_answer_that_the_coordinator_alone_heard_of_is_made_again() -> None:
    for seed in range(20):
        world = World(["r7"], workers=2, rules=Rules(methods=("ngram",)), seed=seed)
        while len(world.dealer._open["r7"].copies) < 2:
            world.turn_all()
        while not world.members["w0"].is_idle:
            world.turn("w0")
        world.turn_coordinator()
        del world.driver.wires["w0"].out[:]
        world.kill("w0")
        world.turn_all()
        world.notice()
        world.turn_all(100)
        assert world.dealer.answers["r7"].token_ids == truth("r7")


def test_a_request_that_ends_every_worker_is_given_up_at_last() -> None:
    world = World(["r7"], workers=1, rules=Rules(), seed=0)
    with pytest.raises(GroupError, match=f"lost {MOST_RUNS} times"):
        for _ in range(20):
            name = next(iter(world.members))
            world.members[name].turn()
            world.turn_driver()
            world.hire()
            world.kill(name)
            world.notice()


def test_a_request_that_an_engine_refuses_is_named() -> None:
    world = World(["refused"], workers=1, rules=Rules(), seed=0)
    with pytest.raises(GroupError, match="worker w0 refused request refused: too long"):
        world.turn_all(3)
