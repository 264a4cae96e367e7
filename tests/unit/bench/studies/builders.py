import numpy as np
from vllm_specrollout.bench.studies.formulas import StepLine
from vllm_specrollout.bench.studies.group import Group, Guesses, Mode, Workload
from vllm_specrollout.bench.studies.rollout import Setup

VERIFIER = StepLine(base=13.0, request=0.06, steep=0.044, knee=256.0)
DRAFTER = StepLine(base=2.03, request=0.014)
OTHER = StepLine(base=3.0, request=0.03)


def setup(mode=Mode.DECOUPLED, **given):
    return Setup(**{"groups": 1, "verifier": VERIFIER, "drafters": (DRAFTER,), "mode": mode, "window": 3, **given})


def mixed(lengths, *rows):
    """A workload with one row of acceptances per method, the same for all requests where it is a number."""
    acceptance = np.stack([np.broadcast_to(np.asarray(row, dtype=float), len(lengths)) for row in rows])
    return Workload(length=np.asarray(lengths, dtype=np.int64), acceptance=acceptance)


def group_of(mode, acceptance, window, batch, verifier=VERIFIER, drafter=DRAFTER, length=4000, seed=0):
    """A group whose requests do not end within the steps of a test, unless they are to be shorter."""
    work = mixed([length] * batch, acceptance)
    group = Group(0, mode, verifier, (drafter,), work.length, Guesses(work, np.random.default_rng(seed)))
    group.add(np.arange(batch), np.zeros(batch, dtype=np.int64), window)
    return group


def speed(group, steps):
    """Tokens per ms and request over so many steps."""
    ms = 0.0
    for _ in range(steps):
        ms += group.begin()
        group.end()
    return group.counts["tokens"] / group.size / ms
