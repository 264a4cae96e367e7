import numpy as np

from tests.unit.budgets.papers.builders import requests
from vllm_specrollout.budgets.papers.plans import (
    Strategy,
    chain_limits,
    everything_within,
    no_drafts,
    tree_limits,
)
from vllm_specrollout.types import DraftMode


def test_a_chain_is_no_longer_than_its_request_allows() -> None:
    batch = requests(2, max_draft_tokens=3)
    limits = chain_limits(batch, np.asarray([2, 9], np.int32), "window")
    assert limits.max_nodes.tolist() == limits.max_depth.tolist() == [2, 3]
    assert limits.is_chain.all() and limits.reason == "window"


def test_where_nobody_may_draft_that_is_the_reason() -> None:
    batch = requests(2, shape=DraftMode.OFF)
    assert chain_limits(batch, np.asarray([2, 2], np.int32), "window").reason == "nothing to draft"
    assert tree_limits(batch, Strategy(8, 4, 2), "explore").reason == "nothing to draft"


def test_without_limits_nothing_is_merged_and_the_step_is_off() -> None:
    batch = requests(2)
    plan = everything_within([], no_drafts(batch, "large batch"), batch)
    assert (plan.is_on, plan.reason, plan.trees.num_nodes) == (False, "large batch", 0)
    assert list(plan.trees.request_ids) == ["r0", "r1"]
