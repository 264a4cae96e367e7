"""TLT: off for large batches, strategies by batch, rewards that go to the arm which earned them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.policies.builders import feedback_of, most_children, star_of_chains, timing, view, views
from vllm_specrollout.policies.bandit import Draw
from vllm_specrollout.policies.branching import Strategy, with_top_k
from vllm_specrollout.policies.tlt import TltBudget, strategies_for
from vllm_specrollout.trees.build import check, depths
from vllm_specrollout.types import Shape


def _tlt(seed: int = 0, **kwargs: float) -> TltBudget:
    return TltBudget(24, 16, rng=np.random.default_rng(seed), **kwargs)  # type: ignore[arg-type]


def _run(budget: TltBudget, steps: int, *, batch: int, lateness: int, best: Strategy) -> list[Strategy]:
    """An engine where `best` earns twice as much as any other strategy; timings come `lateness` steps late."""
    drawn, timings = [], []
    for _ in range(steps):
        running = views(batch)
        decisions = budget.decide(running)
        trees = budget.choose([star_of_chains(4, 8)] * batch, decisions)
        draw = budget._draw
        assert draw is not None
        strategy = budget.strategies[draw.bucket][draw.arm]
        drawn.append(strategy)
        nodes = sum(tree.size for tree in trees)
        timings.append(timing(batch, nodes, 5.0 if strategy == best else 10.0, tokens=batch * 2))
        late = timings[-1 - lateness] if len(timings) > lateness else None
        budget.observe(
            [feedback_of(tree, 0, v.request_id, batch) for tree, v in zip(trees, running, strict=True)], late
        )
    return drawn


@pytest.mark.parametrize("lateness", [0, 1])
@pytest.mark.parametrize("arm", range(4))
def test_a_reward_reaches_the_arm_that_earned_it_however_late_timings_come(arm: int, lateness: int) -> None:
    budget = _tlt()
    best = budget.strategies[1][arm]
    drawn = _run(budget, 300, batch=4, lateness=lateness, best=best)
    assert drawn[-100:].count(best) > 80
    for other, rewards in zip(budget.strategies[1], budget.bandit._rewards[1], strict=True):
        # 2 tokens a request; in 5 ms for the best arm, in 10 for all others. The first late one may find no step.
        assert set(np.round(rewards, 6)) == {0.4 if other == best else 0.2}


def test_from_32_requests_on_nothing_is_drafted() -> None:
    budget = _tlt()
    assert not any(d.max_nodes for d in budget.decide(views(32)))
    choice = budget.explain()
    assert choice is not None and (choice.is_on, choice.reason) == (False, "large batch")
    assert any(d.max_nodes for d in budget.decide(views(31)))


def test_the_threshold_can_be_set() -> None:
    assert not any(d.max_nodes for d in _tlt(threshold=4).decide(views(4)))


def test_every_batch_below_the_threshold_drafts_and_larger_ones_draft_no_more_per_request() -> None:
    largest = []
    for batch in range(1, 32):
        budget = _tlt()
        drawn = {
            budget.strategies[d.bucket][d.arm]
            for d in (Draw(budget.bandit.bucket(batch), arm, "") for arm in range(2))
        }  # fmt: skip
        largest.append(max(s.nodes for s in drawn))
        assert any(d.max_nodes for d in budget.decide(views(batch)))
    assert largest == sorted(largest, reverse=True)
    assert largest[0] == 24 and largest[-1] == 6


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (2, 1), (3, 64), (64, 64), (24, 16), (64, 2)])
def test_strategies_stay_within_the_engines_limits_and_none_comes_twice(nodes: int, depth: int) -> None:
    for group in strategies_for(nodes, depth):
        assert len(set(group)) == len(group) >= 1
        for strategy in group:
            assert 1 <= strategy.nodes <= nodes
            assert 1 <= strategy.depth <= min(depth, strategy.nodes)


def test_top_k_depth_and_size_shape_the_tree() -> None:
    budget = _tlt()
    for arm, strategy in enumerate(budget.strategies[0]):
        budget.bandit.draw = lambda batch, arm=arm: Draw(0, arm, "exploit")  # type: ignore[method-assign]
        (tree,) = budget.choose([star_of_chains(8, 16)], budget.decide([view()]))
        check(tree)
        assert tree.size <= strategy.nodes
        assert int(depths(tree.parents).max()) <= strategy.depth
        assert most_children([tree]) <= strategy.top_k
        assert tree.size == strategy.nodes or strategy.top_k * strategy.depth == tree.size


def test_top_k_keeps_the_most_probable_children() -> None:
    tree = star_of_chains(5, 2)
    kept = with_top_k(tree, 2)
    assert set(kept.token_ids.tolist()) == {0, 1, 100, 101}
    assert with_top_k(tree, 5) is tree


def test_a_step_with_prompts_in_it_rewards_nobody() -> None:
    budget = _tlt()
    for _ in range(3):
        decisions = budget.decide(views(1))
        trees = budget.choose([star_of_chains(2, 4)], decisions)
        prefill = timing(1, trees[0].size, 50.0)
        budget.observe(
            [feedback_of(trees[0], -1)],
            type(prefill)(prefill.batch, prefill.rows + 7, prefill.nodes, 0, 1, 50.0, is_decode_only=False),
        )
    assert budget.bandit.draw(1).reason == "untried"


def test_new_weights_bring_exploration_back() -> None:
    budget = _tlt()
    _run(budget, 400, batch=4, lateness=1, best=budget.strategies[1][0])
    assert budget.bandit._draws[1] > 300
    budget.decide(views(4, weights_version=1))
    assert budget.bandit._draws[1] == 1


def test_under_one_seed_it_always_draws_the_same() -> None:
    runs = [_run(b := _tlt(seed), 200, batch=4, lateness=1, best=b.strategies[1][2]) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


def test_requests_that_may_not_draft_are_not_asked_for() -> None:
    budget = _tlt()
    assert not any(d.max_nodes for d in budget.decide(views(3, shape=Shape.OFF)))
    choice = budget.explain()
    assert choice is not None and choice.reason == "nothing to draft"
