"""From planned trees to the scheduled step, and from verdicts to what the speculator hears."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.drafters import requests_of, views_of
from tests.trees import batch_of, chain
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.speculator import PlannedStep
from vllm_specrollout.types import (
    EMPTY_TREE,
    DraftTree,
    RequestBatch,
    StepPlan,
    StepTiming,
    TreeBatch,
    VerifyResult,
)
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


class Ready:
    """A speculator that hands out ready trees, and keeps what it is told."""

    def __init__(self, trees: Sequence[DraftTree], is_strict: bool = True) -> None:
        self.trees = trees
        self.heard: list[tuple[PlannedStep | None, TreeBatch, VerifyResult]] = []
        self.times: list[StepTiming | None] = []
        self.guard = Guard(is_strict=is_strict)

    def is_paused(self, step: int, num_requests: int) -> bool:
        return False

    def propose(self, batch: RequestBatch, step: int) -> PlannedStep:
        return PlannedStep(StepPlan(batch_of(self.trees, batch.request_ids), "ready"), batch)

    def observe(self, planned: PlannedStep | None, trees: TreeBatch, result: VerifyResult) -> None:
        self.heard.append((planned, trees, result))

    def timed(self, timing: StepTiming | None) -> None:
        self.times.append(timing)

    def compared(self, checked: int, differing: int) -> None:
        self.compared_with = (checked, differing)


def drafting_of(trees: Sequence[DraftTree], is_strict: bool = True) -> Drafting:
    return Drafting(Ready(trees, is_strict))  # type: ignore[arg-type]


def scheduled(trees: Sequence[DraftTree], request_ids: list[str], tokens: dict[str, list[int]]) -> TreeBatch:
    planned = drafting_of(trees).plan(lambda: requests_of(len(trees)), 1)
    return scheduled_trees(planned, request_ids, tokens)


def test_the_scheduled_step_is_the_planned_trees_in_batch_order():
    tokens = {"0": [5, 6, 7], "2": [8, 9]}
    trees = scheduled([FORKED, EMPTY_TREE, chain([8, 9])], ["2", "0", "1"], tokens)
    assert trees.node_start.tolist() == [0, 2, 5, 5] and trees.request_ids == ["2", "0", "1"]
    assert trees.token_ids.tolist() == [8, 9, 5, 6, 7]
    assert trees.parents.tolist() == [-1, 0, -1, 0, 0]
    assert trees.source.tolist() == [0, 0, 1, 1, 0] and trees.depth.tolist() == [1, 2, 1, 2, 2]


def test_a_tree_that_the_scheduler_cut_is_its_first_nodes():
    trees = scheduled([FORKED], ["0"], {"0": [5, 6]})
    assert trees.parents.tolist() == [-1, 0] and trees.log_q.tolist() == [-0.5, -0.25]


def test_tokens_without_a_tree_are_a_chain():
    trees = scheduled([FORKED], ["0", "new"], {"0": [5, 1], "new": [3]})
    assert trees.parents.tolist() == [-1, 0, -1]
    assert trees.token_ids.tolist() == [5, 1, 3]


@pytest.mark.parametrize("tokens", [{"0": [5, 6, 7, 9]}, {"new": [1]}])
def test_more_tokens_than_were_planned_are_a_chain_too(tokens):
    (name, own), *_ = tokens.items()
    trees = scheduled([FORKED], [name, "other"], tokens)
    assert trees.token_ids.tolist() == own and trees.depth.tolist() == list(range(1, len(own) + 1))


def test_without_a_plan_scheduled_tokens_are_chains():
    trees = scheduled_trees(NO_DRAFTS, ["a", "b"], {"b": [4, 5]})
    assert trees.node_start.tolist() == [0, 0, 2] and trees.parents.tolist() == [-1, 0]


def test_the_scheduler_is_told_of_requests_with_drafts_alone():
    planned = drafting_of([FORKED, EMPTY_TREE]).plan(lambda: requests_of(2), 1)
    assert drafted_tokens(planned) == (["0"], [[5, 6, 7]])


def test_a_verdict_goes_back_with_the_plan_of_its_step():
    drafting = drafting_of([FORKED])
    trees = drafting.plan(lambda: requests_of(1), 1)
    planned = drafting.planned
    drafting.observe(planned, trees, np.asarray([1], np.int32), np.asarray([0], np.int32))
    drafting.timed(TIMING)
    ((heard, verified, result),) = drafting.speculator.heard
    assert heard is planned and verified is trees and result.num_accepted.tolist() == [1]
    assert drafting.speculator.times == [TIMING]


def test_a_paused_step_has_no_plan_and_no_drafts():
    drafting = drafting_of([FORKED])
    drafting.plan(lambda: requests_of(1), 1)
    assert drafting.plan(lambda: None, 2) is NO_DRAFTS and drafting.planned is None and drafting.ms == 0.0


def test_a_mistake_while_drafting_costs_the_drafts_of_the_step():
    drafting = drafting_of([FORKED], is_strict=False)

    def blind() -> RequestBatch:
        raise RuntimeError("no request can be seen")

    assert drafting.plan(blind, 1) is NO_DRAFTS and drafting.ms == 0.0
    assert drafting.speculator.guard.failures == {"drafting": 1}


def test_a_step_that_cannot_be_learned_from_goes_on():
    drafting = drafting_of([FORKED], is_strict=False)

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    drafting.speculator.observe = drafting.speculator.timed = fails
    drafting.observe(None, NO_DRAFTS, np.zeros(0, np.int32), np.zeros(0, np.int32))
    drafting.timed(None)
    assert drafting.speculator.guard.failures == {"learning": 2}


def test_the_first_rank_tells_the_others_whatever_happens(monkeypatch):
    told: list[Any] = []

    def group(rank: int) -> SimpleNamespace:
        return SimpleNamespace(rank_in_group=rank, broadcast_object=lambda trees, src: told.append(trees) or told[0])

    monkeypatch.setattr("vllm_specrollout.worker.drafting.get_tp_group", lambda: group(0))
    first = Drafting(Ready([FORKED], is_strict=False), 2)  # type: ignore[arg-type]
    trees = first.plan(lambda: requests_of(1), 1)
    monkeypatch.setattr("vllm_specrollout.worker.drafting.get_tp_group", lambda: group(1))
    other = Drafting(Ready([]), 2)  # type: ignore[arg-type]

    def unseen() -> RequestBatch:
        raise AssertionError("this rank does not draft")

    assert other.plan(unseen, 1) is trees and other.planned is None and other.is_paused(1, 1)
    other.observe(None, trees, np.zeros(1, np.int32), np.zeros(0, np.int32))
    assert other.speculator.heard == []
    told.clear()
    first.speculator.propose = None  # fails
    assert first.plan(lambda: requests_of(1), 2) is NO_DRAFTS and told == [NO_DRAFTS]


@pytest.mark.parametrize("what", ["trees", "order", "name"])
def test_what_the_first_rank_cannot_tell_leaves_none_of_the_others_waiting(monkeypatch, what):
    """Pickling fails before anything is sent."""
    told: list[Any] = []

    def broadcast_object(said: Any, src: int) -> None:
        if said is not NO_DRAFTS:
            raise MemoryError("it cannot be pickled")
        told.append(said)

    group = SimpleNamespace(rank_in_group=0, broadcast_object=broadcast_object)
    monkeypatch.setattr("vllm_specrollout.worker.drafting.get_tp_group", lambda: group)
    first = Drafting(Ready([FORKED], is_strict=False), 2, is_apart=what == "name")  # type: ignore[arg-type]
    if what == "order":
        first.last_order = lambda: "follow me"
    assert first.plan(lambda: requests_of(1), 1) is NO_DRAFTS and told == [NO_DRAFTS]
    assert first.speculator.guard.failures == {"drafting": 1}


def ready_to_withhold(drafting: Drafting) -> Drafting:
    drafting.withheld.drafted = 1 << 20
    return drafting


def test_a_verdict_is_withheld_in_one_step_and_the_request_then_goes_without_drafts(monkeypatch) -> None:
    drafting = ready_to_withhold(drafting_of([FORKED, FORKED]))
    drafting.plan(lambda: requests_of(2), 1)
    name = drafting.withholding
    assert name in ("0", "1")
    drafting.withheld.hold(name, [9], 20, 0, has_branches=True)
    trees = drafting.plan(lambda: requests_of(2), 2)
    assert [own for own, size in zip(trees.request_ids, trees.sizes, strict=True) if not size] == [name]
    drafting.withheld.compare(name, [9], 20, 0)
    assert drafting.speculator.compared_with == (1, 0)
    assert drafting.plan(lambda: requests_of(2), 3).sizes.tolist() == [3, 3]
    drafting.withheld.hold(name, [9], 30, 0, has_branches=True)
    drafting.speculator.forget = lambda request_id: None
    drafting.forget(name)
    assert not drafting.withheld.held
    assert drafting.plan(lambda: None, 4) is NO_DRAFTS and drafting.withholding == ""


@pytest.mark.parametrize("is_checking", [True, False])
def test_an_engine_checks_itself_unless_it_is_told_not_to(is_checking: bool) -> None:
    speculator: Any = Ready([FORKED])
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

    def of_rank(rank: int, call: Any) -> Drafting:
        group = SimpleNamespace(rank_in_group=rank, broadcast_object=call)
        monkeypatch.setattr("vllm_specrollout.worker.drafting.get_tp_group", lambda: group)
        return Drafting(Ready([FORKED, FORKED]), 2)  # type: ignore[arg-type]

    first = ready_to_withhold(of_rank(0, lambda what, src: told.append(what)))
    other = of_rank(1, lambda what, src: told.pop(0))
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
    drafting = drafting_of([FORKED, EMPTY_TREE], is_strict=False)
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
