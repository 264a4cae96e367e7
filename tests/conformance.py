"""For the type checker alone: what tests and benchmarks hand to an engine as drafter, budget or listener is one.

A method that is missing would otherwise be noticed only where it is called, if at all.
"""

from __future__ import annotations

from bench.host import test_host_time
from bench.runner.switches import SwitchCounter
from tests import drafters
from tests.e2e import pausing, test_distribution, test_v1_small
from tests.e2e.identity import fuzz
from tests.unit.observe import test_contained
from vllm_specrollout.budgets.base import Budget
from vllm_specrollout.drafters.base import Drafter
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.replay.recorder import Recorder

DRAFTERS: list[type[Drafter]] = [
    drafters.Says,
    fuzz.FuzzDrafter,
    pausing.Always,
    test_contained.Sound,
    test_distribution.Drafts,
    test_host_time.Ready,
    test_v1_small.Errs,
]
BUDGETS: list[type[Budget]] = [
    pausing.NeverPays,
    test_contained.Broken,
    test_v1_small.Forgets,
]
LISTENERS: list[type[Listener]] = [Metrics, Recorder, SwitchCounter]
