"""A drafter's loop: how much of what its verifier says is taken in at once, and which noise it meets."""

import logging
import random
from typing import Any

import pytest

from tests.reference.decoupled import VOCABULARY, FakeEngine, Line
from tests.unit.cluster.builders import HELLO, OPEN, VERDICT, ints, seeds
from vllm_specrollout.cluster.counter import TAPE, NoiseKind
from vllm_specrollout.cluster.loop import Loop
from vllm_specrollout.cluster.messages import Hello, Noise, Role, Verdict


def test_a_drafter_hears_all_verdicts_before_it_drafts() -> None:
    """One that heard fewer than come in the time of a pass would draft behind tokens of long ago."""
    line = Line(random.Random(1))
    engine = FakeEngine(random.Random(1))
    loop = Loop(engine, line.ends[1], clock=lambda: 0.0)
    line.ends[0].send(HELLO)
    line.ends[0].send(OPEN)
    held = OPEN.token_ids.tolist()
    for at in range(len(held), 1000):
        held.append(at % 50)
        line.ends[0].send(
            Verdict(VERDICT.handle, 0, len(held), ints(*held[-8:]), seeds(1, 2, 3), len(held), window=4, fan_out=2)
        )
    loop.turn()
    assert engine.streams[OPEN.handle].tokens == held


COUNTED = NoiseKind(Noise.COUNTER, "murmur")


def greeted(line: Line, kind: NoiseKind, **details: Any) -> None:
    said = {**kind.details, **details}
    line.ends[0].send(Hello(Role.VERIFIER, VOCABULARY, kind.noise, 0, 0, said))


def answers(line: Line) -> list[NoiseKind]:
    return [NoiseKind.of(message) for message in line.ends[0].receive() if isinstance(message, Hello)]


def test_a_drafter_says_back_which_noise_it_was_told() -> None:
    line = Line(random.Random(1))
    engine = FakeEngine(random.Random(1))
    loop = Loop(engine, line.ends[1], clock=lambda: 0.0)
    loop._greet()
    assert answers(line) == [TAPE], "until it is told"
    for kind in (COUNTED, NoiseKind(Noise.COUNTER, "philox"), TAPE, COUNTED):
        line.ends[0].send(OPEN)
        greeted(line, kind, model="target")
        loop.turn()
        assert answers(line) == [kind] and engine.noise == kind and not engine.streams
    line.ends[0].send(OPEN)
    loop.turn()
    assert engine.streams[OPEN.handle].seed(5) == int(OPEN.seeds[0])


def test_noise_that_a_drafter_does_not_know_is_refused_until_it_is_told_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = Line(random.Random(1))
    engine = FakeEngine(random.Random(1))
    loop = Loop(engine, line.ends[1], clock=lambda: 0.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            greeted(line, NoiseKind(Noise.COUNTER, "sha"))
            line.ends[0].send(OPEN)
            loop.turn()
            assert answers(line) == [NoiseKind(Noise.NONE)]
    assert not engine.streams and engine.noise == TAPE
    assert [record.message for record in caplog.records] == [
        "Spec rollout: nothing is drafted: this drafter does not know the target's noise, `counter` with hash `sha`"
    ]
    greeted(line, COUNTED)
    line.ends[0].send(OPEN)
    loop.turn()
    assert answers(line) == [COUNTED] and OPEN.handle in engine.streams
