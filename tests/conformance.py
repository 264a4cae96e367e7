"""For the type checker alone: what tests and benchmarks hand to an engine as drafter or budget is one.

A method that is missing would otherwise be noticed only where it is called, if at all.
"""

from __future__ import annotations

from bench.host import test_drafting_time, test_host_time
from tests.e2e import pausing, test_distribution, test_v1_small
from tests.e2e.identity import fuzz
from tests.unit import test_containment, test_journal, test_metrics, test_step
from tests.unit.replay import test_recorder
from vllm_specrollout.drafters.base import Drafter
from vllm_specrollout.policies.budget import Policy

DRAFTERS: list[type[Drafter]] = [
    fuzz.FuzzDrafter,
    pausing.Always,
    test_v1_small.Errs,
    test_containment.Sound,
    test_distribution.Drafts,
    test_drafting_time.Ready,
    test_host_time.Ready,
    test_journal.Proposes,
    test_metrics.Repeats,
    test_recorder.Proposes,
    test_step.Says,
]
BUDGETS: list[type[Policy]] = [
    test_v1_small.Forgets,
    pausing.NeverPays,
    test_containment.Broken,
    test_drafting_time.TakesAll,
]
