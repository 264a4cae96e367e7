from dataclasses import replace

import numpy as np
import pytest

from tests.trees import batch_of, tree_of
from tests.unit.budgets.builders import chains, verified
from vllm_specrollout.observe.heads import POSITIONS, Heads, counted, difference
from vllm_specrollout.types import ROOT, TreeBatch, VerifyResult

SOURCE, BATCH, DEPTH = 2, 8, 4
REQUESTS = [f"r{i}" for i in range(BATCH)]


def verdict(*accepted: int, source: int = SOURCE) -> tuple[TreeBatch, VerifyResult]:
    """Chains of requests "r0", "r1", ... of which so many tokens were met."""
    trees = chains(len(accepted), DEPTH, 0.75, source=source)
    return trees, verified(trees, accepted)


def run(heads: Heads, rate: float, positions: int, rng: np.random.Generator) -> int:
    """Steps of `BATCH` requests whose drafts are met so often; returns the positions before the head was judged."""
    before = 0
    while before < positions and heads.verdict is None:
        accepted = (rng.random((BATCH, DEPTH)) < rate).cumprod(axis=1).sum(axis=1)
        before += int(np.minimum(accepted + 1, DEPTH).sum())
        heads.observe(*verdict(*accepted.tolist()))
    return before


def loaded(rate: float = 0.8, positions: int = 4000, seed: int = 0) -> tuple[Heads, np.random.Generator]:
    """A head on probation behind one that was met so often."""
    heads, rng = Heads(SOURCE), np.random.default_rng(seed)
    run(heads, rate, positions, rng)
    heads.load(is_judged=True)
    for name in REQUESTS:
        heads.admit(name)
    return heads, rng


def test_a_position_counts_where_its_parent_holds_and_at_its_depth() -> None:
    counts = counted(*verdict(0, 2, 4), SOURCE)
    assert counts[0, 1:5].tolist() == [3, 2, 2, 1] and counts[1, 1:5].tolist() == [2, 2, 1, 1]
    assert counts[0].sum() == 8 and counts[1].sum() == 6


def test_alternatives_and_other_drafters_nodes_do_not_count() -> None:
    """A comb: the alternative beside the first choice was met, and what hangs on the first choice says nothing."""
    sources = np.array([SOURCE, SOURCE + 1, SOURCE], np.int32)
    comb = batch_of([replace(tree_of([ROOT, ROOT, 0], [5, 6, 7], [0.9] * 3), source=sources)])
    counts = counted(comb, VerifyResult(np.array([1], np.int32), np.array([1], np.int32)), SOURCE)
    assert counts[0].sum() == counts[0, 1] == 1 and not counts[1].any()
    assert not counted(*verdict(2, 2, source=0), SOURCE).any()


def test_of_a_parents_children_the_first_alone_counts() -> None:
    """Two wide trees: in the first the second child was met, and then the first below it; in the second nothing was."""
    wide = batch_of([tree_of([ROOT, ROOT, 0, 1, 1], range(5), [0.9] * 5, SOURCE)] * 2)
    counts = counted(wide, VerifyResult(np.array([2, 0], np.int32), np.array([1, 3], np.int32)), SOURCE)
    assert counts[:, 1:3].tolist() == [[2, 1], [0, 1]]


def test_requests_that_were_there_before_do_not_count() -> None:
    counts = counted(*verdict(4, 1, 4), SOURCE, {"r1"})
    assert counts[:, 1:4].tolist() == [[1, 1, 0], [1, 0, 0]]


def test_depths_are_compared_with_themselves() -> None:
    """The new head is as good at each depth, and is drafted for deeper, where both are met less often."""
    old, new = np.zeros((2, 65)), np.zeros((2, 65))
    old[:, 1], old[:, 2] = (1000, 900), (100, 50)
    new[:, 1], new[:, 2] = (500, 450), (500, 250)
    assert abs(difference(old, new)) < 1e-9
    new[1, 1] = 400
    assert difference(old, new) < -3


def test_a_head_that_drafts_badly_goes_back_long_before_its_probation_ends() -> None:
    heads, rng = loaded()
    assert heads.is_on_probation and (heads.number, heads.parent) == (1, 0)
    assert run(heads, 0.1, POSITIONS, rng) < 200
    assert heads.verdict == (1, False)
    heads.judged(stays=False)
    assert (heads.number, heads.parent, heads.went_back, heads.verdict) == (0, -1, 1, None)
    assert heads.as_dict()["match_rate"] == pytest.approx(0.8, abs=0.03), "what was known of it is known again"
    assert heads.load(is_judged=True) == 2 and heads.parent == 0, "no number comes twice"


@pytest.mark.parametrize("seed", range(8))
def test_a_head_that_is_a_tenth_worse_goes_back_within_its_probation(seed: int) -> None:
    heads, rng = loaded(seed=seed)
    run(heads, 0.72, 2 * POSITIONS, rng)
    assert heads.verdict == (1, False)


def test_of_heads_as_good_as_the_last_one_in_twenty_goes_back_and_of_better_ones_none() -> None:
    gone = {0.8: 0, 0.84: 0}
    for rate in gone:
        for seed in range(40):
            heads, rng = loaded(seed=seed)
            after = run(heads, rate, 2 * POSITIONS, rng)
            stays = heads.verdict == (1, True)
            assert stays == (POSITIONS <= after < POSITIONS + BATCH * DEPTH)
            gone[rate] += not stays
    assert gone[0.84] == 0 and gone[0.8] <= 5


def test_only_requests_that_came_later_are_judged_by() -> None:
    heads, rng = loaded()
    for name in REQUESTS:
        heads.forget(name)
    run(heads, 0.0, POSITIONS, rng)
    assert heads.verdict is None and heads.as_dict()["match_rate"] is None
    heads.admit("r0")
    run(heads, 0.0, POSITIONS, rng)
    assert heads.verdict == (1, False)


def test_of_another_policy_nothing_can_be_compared_and_the_new_head_stays() -> None:
    heads, rng = loaded()
    run(heads, 0.7, 100, rng)
    heads.weights_version = lambda: 1
    heads.observe(*verdict(0))
    assert heads.verdict == (1, True)
    heads.judged(stays=True)
    assert not heads.is_on_probation and heads.number == 1
    heads.weights_version = lambda: 2
    heads.observe(*verdict(0))
    assert heads.verdict is None and heads.as_dict()["match_rate"] is None


def test_a_head_behind_one_of_which_nothing_is_known_stays() -> None:
    heads, rng = Heads(SOURCE), np.random.default_rng(0)
    heads.load(is_judged=True)
    assert heads.verdict == (1, True), "ranks that keep the last one learn that they need not"
    heads.judged(stays=True)
    run(heads, 0.0, 2 * POSITIONS, rng)
    assert heads.verdict is None
    told = {"number": 1, "parent": 0, "is_on_probation": False, "went_back": 0}
    assert heads.as_dict() == told | {"match_rate": 0.0, "match_rate_before": None}


def test_where_ranks_cannot_agree_nobody_is_judged() -> None:
    heads, rng = Heads(SOURCE), np.random.default_rng(0)
    run(heads, 0.9, 500, rng)
    heads.load(is_judged=False)
    run(heads, 0.1, POSITIONS, rng)
    assert heads.verdict is None and not heads.is_on_probation
