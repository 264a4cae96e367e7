from dataclasses import replace

import numpy as np
import pytest

from tests.trees import batch_of
from tests.unit.budgets.builders import timing
from tests.unit.budgets.papers.builders import Line, planned, requests, star_of_chains, step
from vllm_specrollout.budgets.papers import tlt
from vllm_specrollout.budgets.papers.plans import Strategy
from vllm_specrollout.budgets.papers.tlt import Draw, TltBudget, strategies_for
from vllm_specrollout.config.budgets import TltOptions
from vllm_specrollout.types import StepPlan, StepRecord


def _tlt(seed: int = 0, *, fixed: float = 10.0, row: float = 0.2, **options: float) -> TltBudget:
    given = TltOptions(**options)  # type: ignore[arg-type]
    return TltBudget(24, 16, given, rng=np.random.default_rng(seed), cost=Line(fixed, row))


def _draw_of(plan: StepPlan) -> Draw:
    return plan.draw  # type: ignore[attr-defined]


def _run(budget: TltBudget, steps: int, *, batch: int, best: Strategy, lateness: int = 0) -> list[Strategy]:
    """An engine where `best` takes half the time; records come so many steps late."""
    drawn, records = [], []
    for _ in range(steps):
        plan = planned(budget, requests(batch), star_of_chains(4, 8))
        draw = _draw_of(plan)
        drawn.append(budget.strategies[draw.bucket][draw.arm])
        cost = timing(batch, plan.trees.num_nodes, 5.0 if drawn[-1] == best else 10.0, tokens=batch * 2)
        records.append(replace(step([1] * batch, [0] * batch, plan=plan, timing=cost), trees=plan.trees))
        if len(records) > lateness:
            budget.observe(records[-1 - lateness])
    return drawn


@pytest.mark.parametrize("lateness", [0, 1, 3])
@pytest.mark.parametrize("arm", range(3))
def test_a_reward_reaches_the_arm_that_earned_it_however_late(arm: int, lateness: int) -> None:
    budget = _tlt()
    best = budget.strategies[1][arm]
    assert _run(budget, 300, batch=4, best=best, lateness=lateness)[-100:].count(best) > 80
    for strategy, earned in zip(budget.strategies[1], budget.bandit._earned[1], strict=True):
        assert {cost.step_ms for cost in earned} == {5.0 if strategy == best else 10.0}


def test_a_strategy_is_rewarded_alike_at_every_batch_of_its_bucket() -> None:
    budget = _tlt()
    # the same 6 nodes and 3 tokens a request, at the batches at both ends of the last bucket
    rewards = [
        budget.reward(timing(b, 6 * b, 10.0 + 0.2 * 7 * b, tokens=3 * b)) * (10.0 + 1.4 * b) / (10.0 + 0.2 * b)
        for b in (8, 31)
    ]
    assert rewards == pytest.approx([3.0, 3.0])


def test_an_arm_seen_at_smaller_batches_does_not_look_better_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per request and millisecond, the small batch would win; per millisecond alone, the large one."""
    monkeypatch.setattr(tlt, "EPSILON", 0.0)
    budget = _tlt(fixed=0.0, row=1.0)
    # on an engine that is bound by arithmetic, plain decoding yields as much at any batch
    small, large = timing(8, 8, 16.0, tokens=16), timing(31, 31, 62.0, tokens=64)
    assert small.tokens / 8 / small.step_ms > large.tokens / 31 / large.step_ms
    for arm, cost in ((0, small), (1, large), (2, timing(8, 8, 32.0, tokens=8))):
        budget.bandit.record(Draw(2, arm, "test"), cost)
    assert budget.bandit.draw(16).arm == 1


def test_requests_beside_those_that_may_draft_leave_rewards_alone() -> None:
    budget = _tlt()
    for _ in range(3):
        plan = planned(budget, requests(3), star_of_chains(2, 4))
        # six more run, which may not draft: the step is one of nine, of another bucket than three
        cost = timing(9, plan.trees.num_nodes, 10.0, tokens=12)
        budget.observe(replace(step([1], [0], plan=plan, timing=cost), trees=plan.trees))
    assert [len(earned) for earned in budget.bandit._earned[1]] == [1, 1, 1]
    assert budget.limits(requests(3)).reason != "untried"


def test_from_32_requests_on_nothing_is_drafted() -> None:
    budget = _tlt()
    assert [budget.steps_off(n) for n in (0, 31, 32, 500)] == [0, 0, 1, 1]
    plan = planned(budget, requests(32), star_of_chains(2, 2))
    assert (plan.is_on, plan.reason, plan.trees.num_nodes) == (False, "large batch", 0)
    assert planned(budget, requests(31), star_of_chains(2, 2)).trees.num_nodes


def test_the_threshold_can_be_set() -> None:
    assert _tlt(threshold=4).steps_off(4) and not _tlt(threshold=5).steps_off(4)


def test_larger_batches_verify_no_more_per_request() -> None:
    most = [int(_tlt().limits(requests(batch)).max_nodes.max()) for batch in range(1, 32)]
    assert most == sorted(most, reverse=True)
    assert (most[0], most[1], most[-1]) == (24, 18, 6)


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (2, 1), (3, 64), (64, 64), (24, 16), (64, 2)])
def test_strategies_stay_within_the_engines_limits_and_none_comes_twice(nodes: int, depth: int) -> None:
    for group in strategies_for(nodes, depth, TltOptions()):
        assert len(set(group)) == len(group) >= 1
        for strategy in group:
            assert 1 <= strategy.nodes <= nodes
            assert 1 <= strategy.depth <= min(depth, strategy.nodes)


def test_strategies_have_the_papers_depth_and_its_one_top_k() -> None:
    groups = strategies_for(64, 64, TltOptions())
    assert [sorted({s.nodes for s in group}) for group in groups] == [[64], [48], [16]]
    assert all(max(s.depth for s in group) == 10 for group in groups)
    assert {s.top_k for group in groups for s in group} == {8}


def test_depth_and_size_bound_the_tree_and_top_k_is_its_beam() -> None:
    budget = _tlt(top_k=2)
    for arm, strategy in enumerate(budget.strategies[0]):
        budget.bandit.draw = lambda batch, arm=arm: Draw(0, arm, "exploit")  # type: ignore[method-assign]
        trees = planned(budget, requests(1), star_of_chains(8, 16)).trees
        assert int(trees.depth.max()) <= strategy.depth
        assert np.bincount(trees.depth).max() <= 2
        assert trees.num_nodes == min(strategy.nodes, 2 * strategy.depth)


def test_steps_with_prompts_or_without_drafts_reward_nobody() -> None:
    budget = _tlt()
    plan = planned(budget, requests(1), star_of_chains(2, 4))
    prefill = timing(1, plan.trees.num_nodes, 50.0, is_decode_only=False)
    budget.observe(StepRecord(plan, plan.trees, step([1], [0]).result, prefill))
    nothing = batch_of([star_of_chains(1, 0)], ["r0"])
    budget.observe(StepRecord(plan, nothing, step([0], [0]).result, timing(1, 0, 5.0)))
    assert budget.limits(requests(1)).reason == "untried"


def test_under_one_seed_it_always_draws_the_same() -> None:
    runs = [_run(b := _tlt(seed), 200, batch=4, best=b.strategies[1][2]) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
