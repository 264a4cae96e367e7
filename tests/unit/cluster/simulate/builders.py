import numpy as np

from vllm_specrollout.cluster.simulate.group import Group, Method, Waiting
from vllm_specrollout.cluster.simulate.guesses import Guesses
from vllm_specrollout.cluster.simulate.rollout import Setup
from vllm_specrollout.cluster.simulate.step_line import StepLine
from vllm_specrollout.cluster.simulate.workload import constant_workload
from vllm_specrollout.decoupled.rates import Mode

VERIFIER = StepLine(base=13.0, request=0.06, steep=0.044, knee=256.0)
DRAFTER = Method(name="small", line=StepLine(base=2.03, request=0.014))
OTHER = Method(name="other", line=StepLine(base=3.0, request=0.03))


def setup(mode=Mode.DECOUPLED, **given):
    return Setup(**{"groups": 1, "verifier": VERIFIER, "methods": (DRAFTER,), "mode": mode, "window": 3, **given})


def long_group(mode, acceptance, window, batch, waiting=Waiting.NEVER, verifier=VERIFIER, length=4000, seed=0):
    """A group whose requests do not end within the steps of a test."""
    work = constant_workload([length] * batch, acceptance)
    guesses = Guesses(work, 1, np.random.default_rng(seed))
    group = Group(0, verifier, mode, work.length, guesses, waiting)
    group.copies.add(np.arange(batch), np.zeros(batch, dtype=np.int64), window, mode is Mode.DECOUPLED)
    return group


def speed(group, steps, method=DRAFTER):
    """Tokens per ms and request over so many steps."""
    ms = 0.0
    for _ in range(steps):
        ms += group.begin(method)
        group.end()
    assert group.copies.position.max() < 4000
    return group.counts.tokens / ms / group.copies.size
