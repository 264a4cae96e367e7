"""One link, and several of them to be attached, detached and assigned: what is refused, and what is counted."""

import json
import logging
import random
from typing import Any

import numpy as np
import pytest

from tests.reference.decoupled import VOCABULARY, FakeNoise, Line
from vllm_specrollout.cluster.child import DrafterProcessError
from vllm_specrollout.cluster.counter import TAPE, NoiseKind
from vllm_specrollout.cluster.link import HANG_S
from vllm_specrollout.cluster.link import Line as Watched
from vllm_specrollout.cluster.mailbox import MailboxError
from vllm_specrollout.cluster.messages import (
    MAX_TOKENS,
    Beat,
    Bye,
    Close,
    Drafts,
    Hello,
    Message,
    Noise,
    Open,
    Role,
    Verdict,
)
from vllm_specrollout.drafters.decoupled import MOST_LINKS, DecoupledDrafter
from vllm_specrollout.errors import ConfigError, SpecRolloutError
from vllm_specrollout.types import DraftLimits, RequestBatch, RequestView, TreeBatch

HELLO = Hello(Role.DRAFTER, VOCABULARY, Noise.TAPE, 64, 0)
COUNTED = NoiseKind(Noise.COUNTER, "murmur")


class Engine:
    """An engine's side, and the other ends of its mailboxes."""

    def __init__(self, kind: NoiseKind = TAPE) -> None:
        self.lines = {name: Line(random.Random(1)) for name in ("ipc://one", "ipc://two")}
        self.now = 0.0
        self.noise = FakeNoise(kind)
        self.drafter = DecoupledDrafter(
            self.noise, 0, vocab_size=VOCABULARY, connect=self.connect, clock=lambda: self.now
        )
        self.tokens = {"0": [1, 2, 3], "1": [4, 5, 6]}

    def connect(self, address: str, keys: str | None) -> Any:
        if address not in self.lines:
            raise MailboxError(f"nobody serves at `{address}`", "start it")
        return self.lines[address].reopened()

    def heard(self, name: str) -> list[Message]:
        return self.lines[f"ipc://{name}"].ends[1].receive()

    def say(self, name: str, message: Message) -> None:
        self.lines[f"ipc://{name}"].ends[1].send(message)

    def step(self) -> TreeBatch:
        self.noise.lengths = {name: len(tokens) for name, tokens in self.tokens.items()}
        views = [
            RequestView(f"{name}", np.asarray(tokens, np.int32), 3, 20, name=f"client-{name}")
            for name, tokens in self.tokens.items()
        ]
        batch = RequestBatch.of(views)
        return self.drafter.propose(batch, DraftLimits(batch.max_nodes, batch.max_depth, batch.is_chain))


@pytest.fixture
def engine() -> Engine:
    return Engine()


def drafts(handle: int, position: int, *rows: tuple[int, int, float]) -> Drafts:
    tokens, parents, q = zip(*rows, strict=True)
    return Drafts(
        handle, 0, position, np.asarray(tokens, np.int32), np.asarray(parents, np.int32), np.asarray(q, np.float32)
    )


def test_a_drafter_drafts_from_the_step_after_its_greeting_for_requests_in_flight(engine: Engine) -> None:
    assert engine.drafter.attach("one", "ipc://one")["is_there"] is False
    assert [type(message) for message in engine.heard("one")] == [Hello]
    engine.step()
    assert engine.heard("one") == []
    engine.tokens["0"] += [7, 8]
    engine.say("one", HELLO)
    engine.step()
    opened = engine.heard("one")
    assert [message.token_ids.tolist() for message in opened if isinstance(message, Open)] == [
        [1, 2, 3, 7, 8],
        [4, 5, 6],
    ]
    assert opened[0].seeds[0] == 5, "its noise begins behind the tokens that it has"
    engine.say("one", drafts(1, 5, (9, -1, -0.5)))
    assert engine.step().tree(0).token_ids.tolist() == [9]


def test_of_more_trees_than_one_look_brings_the_newest_is_proposed(engine: Engine) -> None:
    engine.drafter.attach("one", "ipc://one")
    engine.say("one", HELLO)
    engine.step()
    for number in range(1000):
        engine.say("one", drafts(1, 3, (number % VOCABULARY, -1, -0.5)))
        engine.say("one", drafts(2, 3, (number % VOCABULARY, -1, -0.5)))
    engine.say("one", drafts(2, 3, (7, -1, -0.5)))
    trees = engine.step()
    assert [trees.tree(i).token_ids.tolist() for i in range(2)] == [[999 % VOCABULARY], [7]]


def test_a_flood_of_messages_is_taken_in_over_several_steps(engine: Engine) -> None:
    engine.drafter.attach("one", "ipc://one")
    for _ in range(10_000):
        engine.say("one", Beat(0.0, 0))
    left = engine.lines["ipc://one"].ends[0].own
    found = []
    while left:
        engine.step()
        found.append(len(left))
    assert found == [5904, 1808, 0]


def test_branches_of_two_drafters_are_one_tree(engine: Engine) -> None:
    for name in ("one", "two"):
        engine.drafter.attach(name, f"ipc://{name}")
        engine.say(name, HELLO)
    engine.step()
    engine.say("one", drafts(1, 3, (9, -1, -0.5), (8, 0, -0.5), (7, -1, -3.0)))
    engine.say("two", drafts(1, 3, (9, -1, -0.25), (6, 0, -0.5)))
    tree = engine.step().tree(0)
    assert (tree.token_ids.tolist(), tree.parents.tolist()) == ([9, 8, 6, 7], [-1, 0, 0, -1])
    assert tree.log_q.tolist() == [-0.25, -0.5, -0.5, -3.0]
    assert tree.source.tolist() == [0, 0, 0, 1], "a chain's own choices stay first ones"
    engine.tokens["0"] += [9, 6]
    engine.step()
    one, two = (engine.drafter.state()[name]["requests"]["0"] for name in ("one", "two"))
    assert one == {"name": "client-0", "tried": 2, "matched": 1, "covered": 1, "wasted": 0}
    assert two == {"name": "client-0", "tried": 2, "matched": 2, "covered": 2, "wasted": 0}


def test_a_drafter_drafts_for_those_that_it_is_assigned(engine: Engine) -> None:
    engine.drafter.attach("one", "ipc://one", request_ids=["client-1"])
    engine.say("one", HELLO)
    engine.step()
    assert [type(message) for message in engine.heard("one")] == [Hello, Open]
    assert list(engine.drafter.links["one"].requests.open) == ["1"]
    engine.drafter.assign("one", ["0"])
    engine.step()
    assert [type(message) for message in engine.heard("one")] == [Close, Open]
    assert engine.drafter.assign("one", None)["request_ids"] is None
    engine.step()
    assert set(engine.drafter.links["one"].requests.open) == {"0", "1"}


def test_a_drafter_that_is_let_go_hears_that_and_another_goes_on(engine: Engine) -> None:
    for name in ("one", "two"):
        engine.drafter.attach(name, f"ipc://{name}")
        engine.say(name, HELLO)
    engine.step()
    engine.heard("one"), engine.heard("two")
    end = engine.lines["ipc://one"].ends[0]
    state = engine.drafter.detach("one")
    assert state["is_there"] and len(state["requests"]) == 2
    assert [type(message) for message in engine.heard("one")] == [Close, Close, Bye]
    assert end.is_closed and list(engine.drafter.links) == ["two"]
    engine.tokens["0"].append(3)
    engine.step()
    assert [type(message) for message in engine.heard("two")] == [Verdict]
    assert engine.drafter.works_ahead
    engine.drafter.detach("two")
    assert not engine.drafter.works_ahead and engine.step().num_nodes == 0


BAD: dict[str, Any] = {
    "a name that is taken": lambda drafter: drafter.attach("one", "ipc://two"),
    "no name": lambda drafter: drafter.attach("", "ipc://two"),
    "a name that is none": lambda drafter: drafter.attach(7, "ipc://two"),
    "an address where nobody is": lambda drafter: drafter.attach("two", "ipc://three"),
    "an address that is none": lambda drafter: drafter.attach("two", None),
    "a window that is too wide": lambda drafter: drafter.attach("two", "ipc://two", window=65),
    "no choices": lambda drafter: drafter.attach("two", "ipc://two", fan_out=0),
    "requests that are a text": lambda drafter: drafter.attach("two", "ipc://two", request_ids="0"),
    "requests that are numbers": lambda drafter: drafter.assign("one", [0]),
    "an unknown name to detach": lambda drafter: drafter.detach("two"),
    "an unknown name to assign": lambda drafter: drafter.assign("two", None),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_clear_error_and_changes_nothing(engine: Engine, what: str) -> None:
    engine.drafter.attach("one", "ipc://one")
    engine.say("one", HELLO)
    engine.step()
    before = engine.drafter.state()
    with pytest.raises(SpecRolloutError) as refused:
        BAD[what](engine.drafter)
    assert refused.value.cause and refused.value.hint
    engine.step()
    assert engine.drafter.state() == before
    assert engine.lines["ipc://two"].ends[0].session == 0, "no mailbox was opened"


def test_no_more_drafters_are_attached_than_a_step_can_hear(engine: Engine) -> None:
    engine.lines = {f"ipc://{i}": Line(random.Random(i)) for i in range(MOST_LINKS + 1)}
    for i in range(MOST_LINKS):
        engine.drafter.attach(str(i), f"ipc://{i}")
    with pytest.raises(ConfigError, match="16 drafters are attached"):
        engine.drafter.attach("more", f"ipc://{MOST_LINKS}")


def test_another_vocabulary_is_said_once_and_nothing_is_drafted(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.drafter.attach("one", "ipc://one")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            engine.say("one", Hello(Role.DRAFTER, VOCABULARY + 1, Noise.TAPE, 64, 0))
            engine.now += 100.0
            engine.step()
    state = engine.drafter.state()["one"]
    assert not state["is_there"] and "vocabulary has 51 tokens, the target's 50" in state["error"]
    assert len(caplog.records) == 1
    assert [type(message) for message in engine.heard("one")] == [Hello], "it is asked no more"
    engine.say("one", HELLO)  # the right one at last
    engine.step()
    assert engine.drafter.state()["one"]["is_there"] and not engine.drafter.state()["one"]["error"]


def test_a_drafter_that_does_not_answer_is_greeted_again_with_ever_more_patience(engine: Engine) -> None:
    engine.drafter.attach("one", "ipc://one")
    greeted = []
    for second in range(140):
        engine.now = float(second)
        engine.step()
        greeted += [second for message in engine.heard("one") if isinstance(message, Hello)]
    assert greeted == [0, 1, 3, 7, 15, 31, 63, 127]


def test_a_drafter_that_hangs_is_no_longer_counted_on_and_comes_back(engine: Engine) -> None:
    engine.drafter.attach("one", "ipc://one")
    engine.say("one", HELLO)
    for _ in range(3):
        engine.tokens["0"].append(1)
        engine.step()
    engine.now += HANG_S + 1
    engine.step()
    assert not engine.drafter.state()["one"]["is_there"] and not engine.drafter.links["one"].requests.open
    engine.say("one", HELLO)
    engine.step()
    assert engine.drafter.state()["one"]["is_there"]


class Hopeless:
    """A process that cannot be kept alive."""

    pid, restarts, waited_s = None, 5, 0.0

    def watch(self) -> bool:
        raise DrafterProcessError("the drafter's process ended with status 3", "look at it")

    def dismiss(self) -> None: ...

    def see_off(self) -> bool:
        return True


def test_a_process_that_cannot_be_kept_alive_fails_nothing(engine: Engine) -> None:
    """Its faults are not ours: even where failures of ours end a test, the other drafters go on."""
    process: Any = Hopeless()
    engine.drafter.link("dead", engine.lines["ipc://two"].reopened(), process)
    engine.drafter.attach("one", "ipc://one")
    engine.say("one", HELLO)
    engine.step()
    engine.say("one", drafts(1, 3, (9, -1, -0.5)))
    assert engine.step().num_nodes == 1
    assert "status 3" in engine.drafter.state()["dead"]["error"]


class Stubborn:
    """A process that does not end when it is asked to, and what it was told."""

    pid, restarts, waited_s, is_ready = 7, 0, 0.0, False

    def __init__(self) -> None:
        self.told: list[str] = []
        self.has_ended = False

    def watch(self) -> bool:
        self.told.append("watch")
        return False

    def dismiss(self) -> None:
        self.told.append("dismiss")

    def see_off(self) -> bool:
        self.told.append("see off")
        return self.has_ended

    def stop(self) -> None:
        self.told.append("stop")


def test_a_detached_process_is_looked_after_in_each_step_until_it_has_ended(engine: Engine) -> None:
    process: Any = Stubborn()
    engine.drafter.link("own", engine.lines["ipc://two"].reopened(), process)
    engine.drafter.detach("own")
    engine.step()
    engine.step()
    assert process.told == ["dismiss", "see off", "see off"]
    process.has_ended = True
    engine.step()
    engine.step()
    engine.drafter.close()
    assert process.told == ["dismiss", "see off", "see off", "see off"]


def test_a_process_of_the_engines_with_another_vocabulary_ends_and_keeps_no_memory(engine: Engine) -> None:
    process: Any = Stubborn()
    engine.drafter.link("own", engine.lines["ipc://two"].reopened(), process)
    engine.step()
    engine.say("two", Hello(Role.DRAFTER, VOCABULARY + 1, Noise.TAPE, 64, 0))
    engine.step()
    engine.step()
    assert process.told == ["watch", "dismiss", "see off", "see off"]
    assert "vocabulary has 51 tokens" in engine.drafter.state()["own"]["error"]


def test_a_request_longer_than_a_message_decodes_plainly_and_the_others_are_drafted_for(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.drafter.attach("one", "ipc://one")
    engine.say("one", HELLO)
    engine.tokens["0"] = [1] * (MAX_TOKENS + 1)
    engine.tokens["2"] = [1] * (MAX_TOKENS + 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            engine.step()
            engine.tokens["1"].append(1)
    engine.say("one", drafts(1, 6, (9, -1, -0.5)))
    trees = engine.step()
    assert [len(trees.tree(i).token_ids) for i in range(3)] == [0, 1, 0]
    assert engine.drafter.state()["one"]["unfit"] == 2 and len(caplog.records) == 1
    del engine.tokens["0"]
    engine.drafter.forget("0")
    engine.tokens["0"] = [1, 2]  # another request of that name
    engine.step()
    assert set(engine.drafter.links["one"].requests.open) == {"0", "1"}


def test_a_process_of_the_engines_has_loaded_once_it_greets(engine: Engine) -> None:
    process: Any = Stubborn()
    engine.drafter.link("own", engine.lines["ipc://two"].reopened(), process)
    engine.step()
    assert not process.is_ready
    engine.say("two", HELLO)
    engine.step()
    assert process.is_ready


def test_what_is_counted_is_plain_and_outlives_its_link(engine: Engine) -> None:
    engine.drafter.attach("one", "ipc://one")
    engine.say("one", HELLO)
    engine.step()
    engine.say("one", drafts(1, 3, (9, -1, -0.5), (8, 0, -0.5), (7, 1, -0.5)))
    engine.say("one", Beat(250.0, 12))
    engine.step()
    engine.tokens["0"].append(2)
    engine.step()
    engine.drafter.forget("0")
    state = json.loads(json.dumps(engine.drafter.state()))["one"]
    named = {key: state[key] for key in ("opened", "verdicts", "trees", "nodes", "drafted", "busy_s", "waited_s")}
    assert named == {
        "opened": 2, "verdicts": 1, "trees": 1, "nodes": 3, "drafted": 12, "busy_s": 0.25, "waited_s": 0.0
    }  # fmt: skip
    assert (state["tried"], state["matched"], state["wasted"]) == (1, 0, 2) and list(state["requests"]) == ["1"]
    assert engine.drafter.totals() == (1, 1, 2)
    engine.drafter.detach("one")
    assert engine.drafter.totals() == (0, 1, 2)


def test_whoever_waits_at_a_verifiers_mailbox_is_counted(engine: Engine) -> None:
    class Slow:
        send = receive = close = staticmethod(lambda *_: None)

        def wait(self, timeout_s: float) -> bool:
            engine.now += timeout_s
            return False

    mailbox: Any = Slow()
    line = Watched(mailbox, lambda: engine.now)
    assert line.waited_s == 0.0 and not line.wait(0.5)
    assert line.waited_s == 0.5


def test_steps_never_wait_even_where_waiting_would_be_possible(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: Any) -> bool:
        raise AssertionError("a verifier waited")

    monkeypatch.setattr("tests.reference.decoupled.End.wait", wait)
    engine.drafter.attach("one", "ipc://one")
    engine.say("one", HELLO)
    for _ in range(100):
        engine.tokens["0"].append(1)
        engine.now += 1.0
        engine.step()
    engine.drafter.detach("one")


def hello(kind: NoiseKind) -> Hello:
    return Hello(Role.DRAFTER, VOCABULARY, kind.noise, 64, 0, kind.details)


def test_a_drafter_that_was_not_told_yet_which_noise_is_counted_is_told_and_drafts() -> None:
    engine = Engine(COUNTED)
    engine.drafter.attach("one", "ipc://one")
    engine.say("one", HELLO)  # begun before it could hear
    engine.step()
    told = engine.heard("one")
    assert [(type(message), NoiseKind.of(message)) for message in told] == 2 * [(Hello, COUNTED)]
    assert not engine.drafter.state()["one"]["is_there"]
    engine.say("one", hello(COUNTED))
    engine.step()
    opened = engine.heard("one")
    assert [message.seeds.tolist() for message in opened if isinstance(message, Open)] == [[0], [1 << 20]]
    engine.tokens["1"].append(7)
    engine.step()
    (verdict,) = engine.heard("one")
    assert isinstance(verdict, Verdict) and verdict.seeds.tolist() == [1 << 20]
    # it is begun anew, without a word
    engine.say("one", HELLO)
    engine.step()
    engine.say("one", hello(COUNTED))
    engine.step()
    assert engine.drafter.state()["one"]["is_there"] and not engine.drafter.state()["one"]["error"]


@pytest.mark.parametrize("said", [NoiseKind(Noise.NONE), TAPE, NoiseKind(Noise.COUNTER, "philox")], ids=str)
def test_a_drafter_that_does_not_know_the_targets_noise_is_said_once_and_asked_ever_more_seldom(
    said: NoiseKind, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(COUNTED)
    engine.drafter.attach("one", "ipc://one")
    heard = []
    with caplog.at_level(logging.WARNING):
        for _ in range(200):
            engine.step()
            messages = engine.heard("one")
            heard.append(len(messages))
            if messages:
                assert {type(message) for message in messages} == {Hello}
                engine.say("one", hello(said))
            engine.now += 1.0
    state = engine.drafter.state()["one"]
    assert not state["is_there"] and state["opened"] == 0
    assert state["error"].startswith("the target's noise is `counter` with hash `murmur`, which it does not know")
    assert state["error"].endswith(f"it says {said}")
    assert len(caplog.records) == 1
    assert sum(heard) <= 12 and sum(heard[-60:]) <= 1
    engine.say("one", hello(COUNTED))  # the right one at last
    engine.step()
    assert engine.drafter.state()["one"]["is_there"] and not engine.drafter.state()["one"]["error"]


def test_a_process_of_the_engines_that_does_not_know_its_noise_ends_and_keeps_no_memory() -> None:
    engine, process = Engine(COUNTED), Stubborn()
    engine.drafter.link("own", engine.lines["ipc://two"].reopened(), process)  # type: ignore[arg-type]
    engine.say("two", hello(NoiseKind(Noise.NONE)))
    engine.step()
    engine.step()
    assert "dismiss" in process.told and process.told[-1] == "see off"
