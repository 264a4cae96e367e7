"""The budget: drafts what pays, and nothing where it does not."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specrollout.policies.auto import AutoBudget
from vllm_specrollout.policies.budget import FixedBudget, may_draft
from vllm_specrollout.trees.build import check
from vllm_specrollout.types import DraftTree, RequestView, Shape, StepTiming


def _view(**kwargs: object) -> RequestView:
    return RequestView(**{"request_id": "r", "token_ids": np.zeros(4, np.int32), "num_prompt_tokens": 2,
                          "max_new_tokens": 100, **kwargs})  # fmt: skip


def _chain(probability: float, length: int) -> DraftTree:
    return DraftTree(
        np.arange(length, dtype=np.int32),
        np.arange(-1, length - 1, dtype=np.int32),
        np.full(length, np.log(probability), np.float32),
        np.zeros(length, np.int32),
    )


def _trained(fixed: float, row: float, draft: float = 0.1, branch: float = 0.1) -> AutoBudget:
    """A budget that has seen an engine with these costs."""
    rng, budget = np.random.default_rng(0), AutoBudget(24, 16)
    for _ in range(400):
        batch, nodes = int(rng.integers(1, 9)), int(rng.integers(0, 30))
        branches = int(rng.integers(0, 4)) if nodes else 0
        ms = fixed + row * (batch + nodes) + (draft if nodes else 0.0) + branch * branches
        budget.observe([], StepTiming(batch, batch + nodes, nodes, branches, batch, ms, True))
    return budget


def _chosen(budget: AutoBudget, trees: list[DraftTree]) -> list[int]:
    decisions = budget.decide([_view() for _ in trees])
    return [tree.size for tree in budget.choose(trees, decisions)]


def test_cheap_rows_are_drafted_to_the_full() -> None:
    assert _chosen(_trained(fixed=14.0, row=0.05), [_chain(0.9, 16)]) == [16]


def test_a_node_that_costs_more_than_it_brings_is_not_verified() -> None:
    # 1 token per 10.5 ms plain; a node of probability 0.04 at 0.5 ms a row would bring less than that
    sizes = _chosen(_trained(fixed=10.0, row=0.5), [_chain(0.45, 16)])
    assert 1 <= sizes[0] <= 4


def test_a_compute_bound_engine_is_left_alone() -> None:
    """Rows as dear as steps: nothing short of certainty pays, and the step runs plain."""
    assert _chosen(_trained(fixed=0.2, row=5.0), [_chain(0.6, 16)] * 8) == [0] * 8


def test_drafts_that_do_not_earn_the_fixed_cost_of_drafting_are_dropped() -> None:
    assert _chosen(_trained(fixed=10.0, row=0.05, draft=8.0), [_chain(0.3, 4)]) == [0]


def test_no_more_is_drafted_than_the_request_can_still_use() -> None:
    decision = may_draft(_view(max_new_tokens=3), 24, 16)
    assert (decision.max_nodes, decision.max_depth) == (24, 2)
    assert may_draft(_view(max_new_tokens=1), 24, 16).max_nodes == 0


def test_a_requests_own_limit_and_kind_are_kept() -> None:
    assert may_draft(_view(max_draft_tokens=5), 24, 16).max_nodes == 5
    assert may_draft(_view(shape=Shape.OFF), 24, 16).max_nodes == 0
    assert may_draft(_view(shape=Shape.CHAIN), 24, 16).max_nodes == 16


@pytest.mark.parametrize("budget", [FixedBudget(6, 4), _trained(14.0, 0.05)])
def test_what_is_chosen_is_a_tree_within_bounds_with_the_drafters_own_probabilities(budget: AutoBudget) -> None:
    tree = DraftTree(
        np.asarray([5, 6, 7, 8, 9], np.int32),
        np.asarray([-1, 0, -1, 1, 2], np.int32),
        np.log(np.asarray([0.7, 0.8, 0.2, 0.6, 0.5], np.float32)),
        np.asarray([0, 0, 1, 0, 1], np.int32),
    )
    chosen = budget.choose([tree], budget.decide([_view()]))[0]
    check(chosen)
    claimed = dict(zip(tree.token_ids.tolist(), tree.log_q.tolist(), strict=True))
    assert chosen.size > 0
    assert all(claimed[t] == q for t, q in zip(chosen.token_ids.tolist(), chosen.log_q.tolist(), strict=True))
