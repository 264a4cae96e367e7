"""FastGRPO: equations 1 to 3, and a C_peak that is measured while the engine runs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.policies.builders import feedback_of, most_children, star_of_chains, timing, view, views
from vllm_specrollout.policies.branching import Strategy
from vllm_specrollout.policies.fastgrpo import FastGrpoBudget
from vllm_specrollout.trees.build import depths
from vllm_specrollout.types import StepTiming


def _ms(rows: int, knee: float, flat: float = 10.0, slope: float = 0.3) -> float:
    return flat + slope * max(rows - knee, 0.0)


def _timings(knee: float, largest: int, seed: int = 0, steps: int = 640) -> list[StepTiming]:
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(steps):
        batch = int(rng.integers(1, 9))
        rows = int(rng.integers(batch, largest + 1))
        result.append(timing(batch, rows - batch, _ms(rows, knee) * float(rng.normal(1.0, 0.02))))
    return result


@pytest.mark.parametrize(
    ("c_peak", "batch", "expected"),
    [
        (64.0, 1, Strategy(63, 6, 8)),
        (64.0, 4, Strategy(15, 4, 8)),
        (64.0, 16, Strategy(3, 2, 3)),
        (64.0, 32, Strategy(1, 1, 1)),
        (64.0, 33, None),
        (512.0, 1, Strategy(64, 9, 8)),
    ],
)
def test_size_depth_and_branching_follow_the_equations(c_peak: float, batch: int, expected: Strategy | None) -> None:
    assert FastGrpoBudget(64, 16, start=c_peak).strategy(batch) == expected


def test_a_worse_drafter_drafts_less_deep() -> None:
    shallow, deep = FastGrpoBudget(64, 16, start=64.0, alpha=4.0), FastGrpoBudget(64, 16, start=64.0, alpha=0.5)
    assert (shallow.strategy(1).depth, deep.strategy(1).depth) == (4, 7)  # type: ignore[union-attr]


@pytest.mark.parametrize("knee", [24, 48, 96])
def test_the_knee_is_learned_from_the_steps_that_are_run(knee: int) -> None:
    budget = FastGrpoBudget(64, 16)
    for item in _timings(knee, 256):
        budget.observe([], item)
    assert budget.knee is not None
    assert budget.c_peak == pytest.approx(knee, rel=0.3)


def test_a_profile_gives_the_knee_before_the_first_step() -> None:
    budget = FastGrpoBudget(64, 16)
    budget.seed(_timings(96, 256))
    assert budget.c_peak == pytest.approx(96, rel=0.3)


def test_while_time_is_level_larger_steps_are_tried_and_then_the_knee_is_found() -> None:
    budget, rng = FastGrpoBudget(64, 16, start=16.0), np.random.default_rng(0)
    peaks = []
    for step in range(6000):
        batch = 1 + step % 4
        strategy = budget.strategy(batch)
        nodes = 0 if strategy is None else int(rng.integers(0, batch * strategy.nodes + 1))
        budget.observe([], timing(batch, nodes, _ms(batch + nodes, 40.0) * float(rng.normal(1.0, 0.01))))
        peaks.append(budget.c_peak)
    assert max(peaks) > 40.0
    assert peaks[-1] == pytest.approx(40.0, rel=0.35)


def test_before_anything_is_measured_a_start_stands_in() -> None:
    budget = FastGrpoBudget(24, 16)
    assert budget.c_peak == 32.0 and budget.knee is None
    assert budget.decide(views(4))[0].max_nodes == 7


def test_a_batch_at_the_knee_is_left_alone() -> None:
    budget = FastGrpoBudget(24, 16, start=32.0)
    assert not any(d.max_nodes for d in budget.decide(views(17)))
    choice = budget.explain()
    assert choice is not None and (choice.is_on, choice.reason) == (False, "batch at the knee")


def test_trees_keep_the_bounds_of_the_equations() -> None:
    budget = FastGrpoBudget(64, 16, start=12.0)
    (tree,) = budget.choose([star_of_chains(16, 6)], budget.decide([view()]))
    assert tree.size == 11
    assert most_children([tree]) <= 8
    assert int(depths(tree.parents).max()) <= 4
    budget.observe([feedback_of(tree, 0)], None)


def test_steps_with_prompts_say_nothing_of_the_knee() -> None:
    budget = FastGrpoBudget(24, 16)
    for _ in range(200):
        budget.observe([], StepTiming(1, 200, 0, 0, 1, 90.0, is_decode_only=False))
    assert budget.c_peak == 32.0
