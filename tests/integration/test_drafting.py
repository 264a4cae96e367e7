"""From planned trees to the scheduled step, and from verdicts to what the speculator hears."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.drafters import requests_of, views_of
from tests.integration.test_v2_host import Recorder
from tests.trees import batch_of, chain
from vllm_specrollout.types import EMPTY_TREE, DraftTree, RequestBatch, StepTiming, TreeBatch
from vllm_specrollout.worker.drafting import NO_DRAFTS, Drafting, drafted_tokens, scheduled_trees
from vllm_specrollout.worker.v1.cpu_runner import SpecRolloutCPURunner
from vllm_specrollout.worker.withheld import SelfCheckError

FORKED = DraftTree(
    np.asarray([5, 6, 7], np.int32),
    np.asarray([-1, 0, 0], np.int32),
    np.asarray([-0.5, -0.25, -2.0], np.float32),
    np.asarray([1, 1, 0], np.int32),
)
TIMING = StepTiming(1, 2, 1, 0, 1, 5.0, True)


def drafting_of(*trees: DraftTree, is_strict: bool = True) -> Drafting:
    return Drafting(Recorder(*trees, is_strict=is_strict))  # type: ignore[arg-type]


def planned(*trees: DraftTree) -> TreeBatch:
    return drafting_of(*trees).plan(lambda: requests_of(len(trees)), 1)


def test_the_scheduled_step_is_the_planned_trees_in_batch_order():
    tokens = {"0": [5, 6, 7], "2": [8, 9]}
    trees = scheduled_trees(planned(FORKED, EMPTY_TREE, chain([8, 9])), ["2", "0", "1"], tokens)
    assert trees.node_start.tolist() == [0, 2, 5, 5] and trees.request_ids == ["2", "0", "1"]
    assert trees.token_ids.tolist() == [8, 9, 5, 6, 7]
    assert trees.parents.tolist() == [-1, 0, -1, 0, 0]
    assert trees.source.tolist() == [0, 0, 1, 1, 0] and trees.depth.tolist() == [1, 2, 1, 2, 2]


def test_a_tree_that_the_scheduler_cut_is_its_first_nodes():
    trees = scheduled_trees(planned(FORKED), ["0"], {"0": [5, 6]})
    assert trees.parents.tolist() == [-1, 0] and trees.log_q.tolist() == [-0.5, -0.25]


@pytest.mark.parametrize(
    ("trees", "tokens"),
    [
        ([FORKED], {"0": [5, 1], "new": [3]}),
        ([FORKED], {"0": [5, 6, 7, 9]}),
        ([FORKED], {"new": [1]}),
        ([], {"b": [4, 5]}),
    ],
    ids=["other tokens", "more than planned", "a new request", "no plan"],
)
def test_tokens_that_were_not_planned_are_chains(trees, tokens):
    found = scheduled_trees(planned(*trees) if trees else NO_DRAFTS, ["other", *tokens], tokens)
    lengths = [*map(len, tokens.values())]
    assert found.token_ids.tolist() == sum(tokens.values(), []) and found.sizes.tolist() == [0, *lengths]
    assert found.parents.tolist() == [i - 1 for length in lengths for i in range(length)]
    assert found.depth.tolist() == [i + 1 for length in lengths for i in range(length)]


def test_the_scheduler_is_told_of_requests_with_drafts_alone():
    assert drafted_tokens(planned(FORKED, EMPTY_TREE)) == (["0"], [[5, 6, 7]])


def test_a_verdict_goes_back_with_the_plan_of_its_step():
    drafting = drafting_of(FORKED)
    trees = drafting.plan(lambda: requests_of(1), 1)
    own = drafting.planned
    drafting.observe(own, trees, np.asarray([1], np.int32), np.asarray([0], np.int32))
    drafting.timed(TIMING)
    ((heard, verified, result),) = drafting.speculator.observed
    assert heard is own and verified is trees and result.num_accepted.tolist() == [1]
    assert drafting.speculator.times == [TIMING]


def test_a_paused_step_has_no_plan_and_no_drafts():
    drafting = drafting_of(FORKED)
    drafting.plan(lambda: requests_of(1), 1)
    assert drafting.plan(lambda: None, 2) is NO_DRAFTS and drafting.planned is None and drafting.ms == 0.0


def test_a_mistake_while_drafting_costs_the_drafts_of_the_step():
    drafting = drafting_of(FORKED, is_strict=False)

    def blind() -> RequestBatch:
        raise RuntimeError("no request can be seen")

    assert drafting.plan(blind, 1) is NO_DRAFTS and drafting.ms == 0.0
    assert drafting.speculator.guard.failures == {"drafting": 1}


def test_a_step_that_cannot_be_learned_from_goes_on():
    drafting = drafting_of(FORKED, is_strict=False)

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    drafting.speculator.observe = drafting.speculator.timed = fails
    drafting.observe(None, NO_DRAFTS, np.zeros(0, np.int32), np.zeros(0, np.int32))
    drafting.timed(None)
    assert drafting.speculator.guard.failures == {"learning": 2}


def of_rank(rank: int, broadcast: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Drafting:
    """One of two ranks, whose first one drafts."""
    group = SimpleNamespace(rank_in_group=rank, broadcast_object=broadcast)
    monkeypatch.setattr("vllm_specrollout.worker.drafting.get_tp_group", lambda: group)
    return Drafting(Recorder(FORKED, is_strict=False), 2, **options)  # type: ignore[arg-type]


def test_the_first_rank_tells_the_others_whatever_happens(monkeypatch):
    told: list[Any] = []
    first = of_rank(0, lambda trees, src: told.append(trees), monkeypatch)
    trees = first.plan(lambda: requests_of(1), 1)
    other = of_rank(1, lambda trees, src: told[0], monkeypatch)

    def unseen() -> RequestBatch:
        raise AssertionError("this rank does not draft")

    assert other.plan(unseen, 1) is trees and other.planned is None and other.is_paused(1, 1)
    other.observe(None, trees, np.zeros(1, np.int32), np.zeros(0, np.int32))
    assert other.speculator.observed == []
    told.clear()
    first.speculator.propose = None  # fails
    assert first.plan(lambda: requests_of(1), 2) is NO_DRAFTS and told == [NO_DRAFTS]


@pytest.mark.parametrize("what", ["trees", "order", "name"])
def test_what_the_first_rank_cannot_tell_leaves_none_of_the_others_waiting(monkeypatch, what):
    """Pickling fails before anything is sent."""
    told: list[Any] = []

    def broadcast(said: Any, src: int) -> None:
        if said is not NO_DRAFTS:
            raise MemoryError("it cannot be pickled")
        told.append(said)

    first = of_rank(0, broadcast, monkeypatch, is_apart=what == "name")
    if what == "order":
        first.last_order = lambda: "follow me"
    assert first.plan(lambda: requests_of(1), 1) is NO_DRAFTS and told == [NO_DRAFTS]
    assert first.speculator.guard.failures == {"drafting": 1}


def ready_to_withhold(drafting: Drafting) -> Drafting:
    drafting.withheld.drafted = 1 << 20
    return drafting


def test_a_verdict_is_withheld_in_one_step_and_the_request_then_goes_without_drafts(monkeypatch) -> None:
    drafting = ready_to_withhold(drafting_of(FORKED, FORKED))
    drafting.plan(lambda: requests_of(2), 1)
    name = drafting.withholding
    assert name in ("0", "1")
    drafting.withheld.hold(name, [9], 20, 0, has_branches=True)
    trees = drafting.plan(lambda: requests_of(2), 2)
    assert [own for own, size in zip(trees.request_ids, trees.sizes, strict=True) if not size] == [name]
    drafting.withheld.compare(name, [9], 20, 0)
    assert drafting.speculator.checks == [(1, 0)]
    assert drafting.plan(lambda: requests_of(2), 3).sizes.tolist() == [3, 3]
    drafting.withheld.hold(name, [9], 30, 0, has_branches=True)
    drafting.forget(name)
    assert not drafting.withheld.held
    assert drafting.plan(lambda: None, 4) is NO_DRAFTS and drafting.withholding == ""


@pytest.mark.parametrize("is_checking", [True, False])
def test_an_engine_checks_itself_unless_it_is_told_not_to(is_checking: bool) -> None:
    speculator: Any = Recorder(FORKED)
    speculator.vocab_size = 8
    alone = SimpleNamespace(distributed_executor_backend=None, tensor_parallel_size=1)
    drafting = ready_to_withhold(Drafting.of(speculator, alone, is_checking=is_checking))
    drafting.plan(lambda: requests_of(1), 1)
    assert (drafting.withholding == "0") is is_checking
    drafting.withheld.hold("0", [4], 20, 0, has_branches=False)
    assert bool(drafting.withheld.held) is is_checking
    # a token beyond the vocabulary
    last = batch_of([EMPTY_TREE]), np.asarray([[9]]), np.asarray([1], np.int32)
    if is_checking:
        with pytest.raises(SelfCheckError, match="a vocabulary of 8"):
            drafting.followed(*last)
    else:
        drafting.followed(*last)


def test_all_ranks_withhold_the_same_verdict(monkeypatch) -> None:
    told: list[Any] = []
    first = ready_to_withhold(of_rank(0, lambda what, src: told.append(what), monkeypatch))
    other = of_rank(1, lambda what, src: told.pop(0), monkeypatch)
    trees = first.plan(lambda: requests_of(2), 1)
    assert other.plan(lambda: None, 1) is trees and not told
    assert first.withholding == other.withholding != ""
    first.withheld.end()
    first.plan(lambda: requests_of(2), 2)
    other.plan(lambda: None, 2)
    assert first.withholding == other.withholding == ""


@pytest.mark.parametrize(
    ("tokens", "counts", "culprit"),
    [
        ([[5, 7, 9], [4, -1, -1]], [3, 1], ""),
        ([[5, 8, -1], [4, -1, -1]], [2, 1], ""),
        ([[3, 7, 9], [4, -1, -1]], [3, 1], "0"),  # its first token is none that was drafted
        ([[5, 9, 9], [4, -1, -1]], [3, 1], "0"),
        ([[5, 7, 9], [4, 4, -1]], [3, 2], "1"),  # two tokens without a draft
        ([[5, 7, 50], [4, -1, -1]], [3, 1], "0"),  # beyond the vocabulary
        ([[5, -1, -1], [-1, -1, -1]], [1, 1], "1"),
        ([[5, 7, 9], [4, -1, -1]], [0, 1], "0"),  # nothing, though it drafted
        ([[5, 7, 9], [-1, -1, -1]], [3, 0], ""),  # a prompt that is not over
    ],
)
def test_a_verdict_that_cannot_be_ends_drafts_and_says_what_was_seen(tokens, counts, culprit, caplog) -> None:
    drafting = drafting_of(FORKED, EMPTY_TREE, is_strict=False)
    drafting.vocab_size = 50
    trees = batch_of([FORKED, EMPTY_TREE])
    for _ in range(2):
        drafting.followed(trees, np.asarray(tokens), np.asarray(counts, np.int32))
    assert getattr(drafting.speculator, "stopped", "") == ("self-check" if culprit else "")
    assert len(caplog.records) == bool(culprit)
    if culprit:
        index = int(culprit)
        assert f"request {culprit}: {counts[index]} tokens of {tokens[index]} are no path" in caplog.text
        assert drafting.speculator.guard.failures == {"self-check": 1} and not drafting.withheld.is_on


def test_a_tree_without_scratch_blocks_left_drafts_its_best_path():
    runner = SimpleNamespace(scratch=np.arange(2), block_size=16, noise=SimpleNamespace(most_nodes=None))
    batch = RequestBatch.of(views_of(2, num_tokens=20))
    trees = SpecRolloutCPURunner._fit(runner, batch_of([FORKED, FORKED]), batch)
    assert trees.sizes.tolist() == [3, 2]
    assert trees.parents.tolist() == [-1, 0, 0, -1, 0] and trees.log_q.tolist()[3:] == [-0.5, -0.25]


def test_too_many_nodes_are_cut_to_equal_shares():
    runner = SimpleNamespace(scratch=np.arange(2), block_size=16, noise=SimpleNamespace(most_nodes=4))
    batch = RequestBatch.of(views_of(3, num_tokens=20))
    trees = SpecRolloutCPURunner._fit(runner, batch_of([chain([1, 2, 3]), chain([4, 5, 6]), EMPTY_TREE]), batch)
    assert drafted_tokens(trees) == (["0", "1"], [[1, 2], [4, 5]])
