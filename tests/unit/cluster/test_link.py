"""One link, and several of them to be attached, detached and assigned: what is refused, and what is counted."""

import json
import logging
import random
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.reference.decoupled import VOCABULARY, Box, Wire, sampling
from vllm_specrollout.cluster import messages
from vllm_specrollout.cluster.child import DrafterProcessError
from vllm_specrollout.cluster.link import HANG_S, Link
from vllm_specrollout.cluster.mail import MailError
from vllm_specrollout.cluster.messages import VERSION, Bye, DraftUpdate, Hello, Message, VerifierUpdate, Work
from vllm_specrollout.drafters.decoupled import MOST_LINKS, DecoupledDrafter
from vllm_specrollout.errors import ConfigError, SpecRolloutError
from vllm_specrollout.types import DraftLimits, RequestBatch, RequestView, TreeBatch

HELLO = Hello(VERSION, VOCABULARY)


class Engine:
    """An engine's side, and the other ends of its mail."""

    def __init__(self) -> None:
        self.wires = {name: Wire(random.Random(1), most=100_000) for name in ("ipc://one", "ipc://two")}
        self.now = 0.0
        given = {"connect": self.connect, "clock": lambda: self.now}
        self.drafter = DecoupledDrafter(sampling, 0, vocab_size=VOCABULARY, **given)
        self.tokens = {"0": [1, 2, 3], "1": [4, 5, 6]}

    def connect(self, address: str) -> Box:
        if address not in self.wires:
            raise MailError(f"nobody serves at `{address}`", "start it")
        return self.wires[address].box("engine")

    def heard(self, name: str) -> list[Message]:
        return [message for _, message in self.wires[f"ipc://{name}"].receive()]

    def say(self, name: str, message: Message) -> None:
        (engine,) = self.wires[f"ipc://{name}"].to_engine
        self.wires[f"ipc://{name}"].send(engine, message)

    def hear(self, name: str, message: Message) -> TreeBatch:
        """The drafts of the step after it."""
        self.say(name, message)
        return self.step()

    def step(self) -> TreeBatch:
        views = [
            RequestView(f"{name}", np.asarray(tokens, np.int32), 3, 20, name=f"client-{name}")
            for name, tokens in self.tokens.items()
        ]
        batch = RequestBatch.of(views)
        return self.drafter.propose(batch, DraftLimits(batch.max_nodes, batch.max_depth, batch.is_chain))

    def attach(self, name: str, **given: Any) -> Link:
        """A drafter that is there, and follows all requests."""
        self.drafter.attach(name, f"ipc://{name}", **given)
        self.hear(name, HELLO)
        return self.drafter.links[name]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def drafts(handle: int, position: int, *rows: tuple[int, int, int, float]) -> DraftUpdate:
    """Of one request: token, parent, rank and log probability of each node."""
    tokens, parents, ranks, q = zip(*rows, strict=True)
    return DraftUpdate(
        np.array([handle], np.int64).tobytes(),
        *(np.array(one, np.int32).tobytes() for one in ([position], [0, len(rows)], tokens, parents)),
        bytes(ranks),
        np.array(q, np.float32).tobytes(),
    )


NO_NODES = (b"", b"", np.zeros(1, np.int32).tobytes(), b"", b"", b"", b"")
NOTHING = DraftUpdate(*NO_NODES)


def test_a_drafter_drafts_from_the_step_after_its_greeting_for_requests_in_flight(engine: Engine) -> None:
    assert engine.drafter.attach("one", "ipc://one")["is_there"] is False
    assert [type(message) for message in engine.heard("one")] == [Hello]
    engine.step()
    assert engine.heard("one") == []
    engine.tokens["0"] += [7, 8]
    engine.hear("one", HELLO)
    (told,) = engine.heard("one")
    assert isinstance(told, VerifierUpdate)
    assert [messages.ints(one.token_ids).tolist() for one in told.opened] == [[1, 2, 3, 7, 8], [4, 5, 6]]
    assert [(one.sampling.seed, one.prompt_tokens, one.max_tokens) for one in told.opened] == [(0, 3, 20), (1, 3, 20)]
    assert engine.hear("one", drafts(1, 5, (9, -1, 0, -0.5))).tree(0).token_ids.tolist() == [9]


def test_branches_of_two_drafters_are_one_tree(engine: Engine) -> None:
    for name in ("one", "two"):
        engine.attach(name)
    engine.say("one", drafts(1, 3, (9, -1, 0, -0.5), (8, 0, 0, -0.5), (7, -1, 1, -3.0)))
    tree = engine.hear("two", drafts(1, 3, (9, -1, 0, -0.25), (6, 0, 0, -0.5))).tree(0)
    assert (tree.token_ids.tolist(), tree.parents.tolist()) == ([9, 8, 6, 7], [-1, 0, 0, -1])
    assert tree.log_q.tolist() == [-0.25, -0.5, -0.5, -3.0]
    assert tree.source.tolist() == [0, 0, 0, 1], "a chain's own choices stay first ones"
    engine.tokens["0"] += [9, 6]
    engine.step()
    one, two = (engine.drafter.state()[name]["requests"]["0"] for name in ("one", "two"))
    assert one == {"name": "client-0", "tried": 2, "matched": 1, "covered": 1}
    assert two == {"name": "client-0", "tried": 2, "matched": 2, "covered": 2}


def test_a_drafter_drafts_for_those_that_it_is_assigned(engine: Engine) -> None:
    link = engine.attach("one", request_ids=["client-1"])
    assert list(link.open) == ["1"]
    engine.drafter.assign("one", ["0"])
    engine.step()
    assert list(link.open) == ["0"]
    told = engine.heard("one")[-1]
    assert isinstance(told, VerifierUpdate) and messages.longs(told.closed).tolist() == [1] and len(told.opened) == 1
    assert engine.drafter.assign("one", None)["request_ids"] is None
    engine.step()
    assert set(link.open) == {"0", "1"}


def test_a_drafter_that_is_let_go_hears_that_and_another_goes_on(engine: Engine) -> None:
    for name in ("one", "two"):
        engine.attach(name)
        engine.heard(name)
    state = engine.drafter.detach("one")
    assert state["is_there"] and len(state["requests"]) == 2
    assert [type(message) for message in engine.heard("one")] == [Bye]
    assert list(engine.drafter.links) == ["two"] and not engine.wires["ipc://one"].to_engine
    engine.tokens["0"].append(3)
    engine.step()
    assert [type(message) for message in engine.heard("two")] == [VerifierUpdate]
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
    engine.attach("one")
    before = engine.drafter.state()
    with pytest.raises(SpecRolloutError, match=r"\S\n\nhint: \S"):
        BAD[what](engine.drafter)
    engine.step()
    assert engine.drafter.state() == before and not engine.wires["ipc://two"].to_engine


def test_no_more_drafters_are_attached_than_a_step_can_hear(engine: Engine) -> None:
    engine.wires = {f"ipc://{i}": Wire(random.Random(i)) for i in range(MOST_LINKS + 1)}
    for i in range(MOST_LINKS):
        engine.drafter.attach(str(i), f"ipc://{i}")
    with pytest.raises(ConfigError, match="16 drafters are attached"):
        engine.drafter.attach("more", f"ipc://{MOST_LINKS}")


@pytest.mark.parametrize(
    ("hello", "why"), [(Hello(VERSION, 99), "vocabulary has 99"), (Hello(VERSION + 1, VOCABULARY), "speaks version")]
)
def test_one_that_cannot_draft_here_is_said_once_and_one_that_can_takes_its_place(engine, caplog, hello, why) -> None:
    engine.drafter.attach("one", "ipc://one")
    with caplog.at_level(logging.WARNING, "vllm.specrollout"):
        for _ in range(3):
            engine.hear("one", hello)
    assert len(caplog.records) == 1 and why in caplog.text
    state = engine.drafter.state()["one"]
    assert not state["is_there"] and why in state["error"] and not state["opened"]
    engine.hear("one", HELLO)
    assert engine.drafter.state()["one"]["is_there"] and not engine.drafter.state()["one"]["error"]


def test_a_drafter_that_does_not_answer_is_greeted_again_with_ever_more_patience(engine: Engine) -> None:
    engine.drafter.attach("one", "ipc://one")
    found = []
    for _ in range(400):
        engine.step()
        found += [engine.now for message in engine.heard("one") if isinstance(message, Hello)]
        engine.now += 0.5
    assert found[:5] == [0.0, 1.0, 3.0, 7.0, 15.0] and len(found) < 12


def test_a_drafter_that_hangs_is_no_longer_counted_on_and_comes_back(engine: Engine) -> None:
    link = engine.attach("one")
    engine.tokens["0"].append(7)
    engine.step()
    engine.now += HANG_S + 1.0
    engine.step()
    assert not link.is_there and not link.open
    engine.hear("one", HELLO)
    assert link.is_there and set(link.open) == {"0", "1"}
    engine.hear("one", NOTHING)
    engine.now += HANG_S + 1.0
    engine.step()
    assert link.is_there, "it has answered all that it was told"


def test_a_drafter_that_does_not_keep_up_is_begun_with_anew(engine: Engine) -> None:
    link = engine.attach("one")
    engine.wires["ipc://one"].most = 0
    engine.tokens["0"].append(7)
    assert engine.step().num_nodes == 0 and not link.is_there and not link.open
    engine.wires["ipc://one"].most = 10
    engine.hear("one", HELLO)
    told = engine.heard("one")[-1]
    assert (
        isinstance(told, VerifierUpdate)
        and len(told.opened) == 2
        and set(messages.longs(told.closed).tolist()) >= {1, 2}
    )


def begun(engine: Engine, hello: Hello = HELLO) -> tuple[Link, Any]:
    """A drafter whose process is the engine's."""
    process = Mock(pid=7, restarts=0, is_ready=False)
    process.watch.return_value = False
    link = engine.drafter.link("own", engine.connect("ipc://one"), process)
    engine.hear("one", hello)
    assert process.is_ready
    return link, process


def test_a_process_that_hangs_is_killed_and_its_successor_drafts(engine: Engine) -> None:
    link, process = begun(engine)
    engine.tokens["0"].append(7)
    engine.step()
    engine.now += HANG_S + 1.0
    process.watch.return_value = True
    engine.step()
    process.kill.assert_called_once_with()
    assert not link.is_there
    process.watch.return_value = False
    engine.hear("one", HELLO)
    assert engine.hear("one", drafts(3, 4, (9, -1, 0, -0.5))).num_nodes == 1 and link.is_there


def test_a_process_that_cannot_be_kept_alive_fails_nothing(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    link, process = begun(engine)
    process.watch.side_effect = DrafterProcessError("the drafter's process ended", "look at its log")
    with caplog.at_level(logging.WARNING, "vllm.specrollout"):
        for _ in range(3):
            assert engine.step().num_nodes == 0
    assert len(caplog.records) == 1 and link.error and process.dismiss.called


def test_a_process_of_the_engines_with_another_vocabulary_ends_and_keeps_no_memory(engine: Engine) -> None:
    _, process = begun(engine, Hello(VERSION, 7))
    assert process.dismiss.called and engine.drafter.totals()[0] == 0


def test_a_request_longer_than_a_message_decodes_plainly_and_the_others_are_drafted_for(engine, caplog) -> None:
    engine.tokens["0"] = [1] * (messages.MOST_BYTES // 8 + 1)
    with caplog.at_level(logging.WARNING, "vllm.specrollout"):
        link = engine.attach("one")
        engine.step()
    assert list(link.open) == ["1"] and link.counts.unfit == 1 and len(caplog.records) == 1
    engine.drafter.forget("0")
    engine.tokens["0"] = [1, 2, 3]
    engine.step()
    assert set(link.open) == {"0", "1"}, "its name is another request's now"


def test_more_new_requests_than_a_message_can_say_come_in_several(engine: Engine) -> None:
    engine.tokens = {str(i): [1] * (messages.MOST_BYTES // 24) for i in range(7)}
    link = engine.attach("one")
    assert len(link.open) == 3
    for _ in range(2):
        engine.step()
    assert len(link.open) == 7 and not link.counts.unfit


def test_drafts_that_are_none_are_dropped_and_counted_and_said_once(engine, caplog) -> None:
    link = engine.attach("one")
    with caplog.at_level(logging.WARNING, "vllm.specrollout"):
        for _ in range(3):
            assert engine.hear("one", drafts(1, 3, (VOCABULARY, -1, 0, -0.5))).num_nodes == 0
    assert link.counts.malformed == 3 and len(caplog.records) == 1
    assert engine.hear("one", drafts(1, 3, (5, -1, 0, -0.5))).num_nodes == 1


def test_what_is_counted_is_plain_and_outlives_its_link(engine: Engine) -> None:
    link = engine.attach("one")
    engine.say("one", DraftUpdate(*NO_NODES, Work(500.0, 5, 9, 7, 2)))
    engine.hear("one", drafts(1, 3, (9, -1, 0, -0.5)))
    state = engine.drafter.state()["one"]
    assert json.loads(json.dumps(state)) == state
    assert (state["drafted"], state["busy_s"], state["trees"], state["wasted"]) == (7, 0.5, 1, 2)
    engine.now += 2.0
    engine.hear("one", NOTHING)
    assert list(link.beats) == [Work(500.0, 5, 9, 7, 2)]
    assert engine.drafter.totals() == (1, 1, 2)
    engine.drafter.detach("one")
    assert engine.drafter.totals() == (0, 1, 2)
