"""A drafter's loop: how much of what its verifier says is taken in at once."""

import random

from tests.reference.decoupled import FakeEngine, Line
from tests.unit.decoupled.builders import HELLO, OPEN, VERDICT, ints, seeds
from vllm_specrollout.decoupled.loop import Loop
from vllm_specrollout.decoupled.messages import Verdict


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
