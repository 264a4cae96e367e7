"""Whose drafts a request gets on the device, and what is kept of them; how they are looked up is another matter."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from vllm_specrollout.kernels.draft_choice.naive import LINED, LOOKED, MODELLED, WITHHELD

from tests.faults.devices import States
from tests.faults.hosts import WITHOUT_A_DEVICE
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.worker.v2.device_drafts import LINE, Bystander, DeviceDrafts
from vllm_specrollout.worker.v2.told import NOBODY, SIBLINGS, Told

WIDTH = 4


def drafts_of(patch: pytest.MonkeyPatch, told: dict[str, Told]) -> DeviceDrafts:
    """Of running requests, for which nothing is looked up."""
    for name in ("get_tp_group", "Lookup", "choose"):
        patch.setattr(f"vllm_specrollout.worker.v2.device_drafts.{name}", WITHOUT_A_DEVICE[f"device_drafts.{name}"])
    states = States(3, WIDTH)
    for name in told:
        states.add(name)
        states.tell(name, [1, 2, 3])
    made = DeviceDrafts(Bystander(WIDTH), 0, states, told.__getitem__, None, 4, Guard(is_strict=True))
    made.known, made.looks_up = told, False
    # whatever has changed
    made.changed = lambda: told
    return made


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> DeviceDrafts:
    """Of `a` in row 0 and `b` in row 1."""
    return drafts_of(monkeypatch, {name: Told(-1, (), np.int32([9]), WIDTH, True) for name in ("a", "b")})


def batch_of(*names: str, starts: Sequence[int] = ()) -> SimpleNamespace:
    rows = np.array(["ab".index(name[0]) for name in names])
    return SimpleNamespace(
        req_ids=list(names),
        num_reqs=len(names),
        idx_mapping=torch.from_numpy(rows),
        idx_mapping_np=rows,
        cu_num_logits=torch.tensor(starts or range(len(names) + 1), dtype=torch.int32),
    )


def carry(drafts: DeviceDrafts, row: int, begin: int, line: list[int]) -> None:
    lines = np.full((1, 1 + LINE), -1, dtype=np.int32)
    lines[0, 0], lines[0, 1 : 1 + len(line)] = begin, line
    drafts.carry(np.int32([row]), lines)


@pytest.mark.parametrize(
    "since, left",
    [
        ([], [4, 5, 6, 7]),
        ([4], [5, 6, 7, 8]),
        ([4, 5, 6, 7], [8, -1, -1, -1]),
        ([4, 5, 6, 7, 8], [-1] * 4),
        ([5], [-1] * 4),
        ([4, 6], [-1] * 4),
    ],
    ids=["nothing came", "its first came", "all but one", "all", "another token came", "and then another"],
)
def test_a_line_goes_on_where_what_came_since_is_its_own(
    drafts: DeviceDrafts, since: list[int], left: list[int]
) -> None:
    carry(drafts, 0, 3, [4, 5, 6, 7, 8])
    drafts._states.tell("a", [1, 2, 3, *since])
    assert drafts.propose(batch_of("a", "b")).tolist() == [left, [-1] * 4]
    assert drafts.drafted[:2, 0].tolist() == [left, [-1] * 4] and drafts.kinds[0] == LINED


def test_a_line_ends_before_what_ends_its_request_and_where_its_room_does(drafts: DeviceDrafts) -> None:
    for row in (0, 1):
        carry(drafts, row, 3, [4, 5, 9, 6])
    drafts.known["b"] = Told(-1, (), np.int32([]), 1, True)
    assert drafts.propose(batch_of("a", "b")).tolist() == [[4, 5, -1, -1], [4, -1, -1, -1]]
    drafts.known["a"] = NOBODY
    assert drafts.propose(batch_of("a")).tolist() == [[-1] * 4]


def test_a_request_has_no_draft_of_the_one_that_had_its_row(drafts: DeviceDrafts) -> None:
    carry(drafts, 0, 3, [4, 5, 6, 7])
    assert drafts.propose(batch_of("a")).tolist() == [[4, 5, 6, 7]]
    # another one in its row, which the line is not of
    drafts._states.tell("a", [8, 8, 8, 8])
    assert drafts.propose(batch_of("a")).tolist() == [[-1] * 4] and (drafts.drafted[0, 0] == -1).all()


def test_each_request_gets_the_draft_of_which_most_is_expected(drafts: DeviceDrafts) -> None:
    for row in (0, 1):
        carry(drafts, row, 3, [4, 5, 6])
    # of nodes that are not there, nothing is expected
    tokens, parents = torch.tensor([[7, 8, -1, -1], [7, -1, -1, -1]]).int(), torch.tensor([[-1, -1, 5, 5]] * 2).int()
    chances = torch.tensor([[1.0, 0.9, 9.0, 9.0], [0.9, 9.0, 9.0, 9.0]])
    drafts.looks_up, drafts.look_up = True, lambda *asked: (tokens, parents, chances)
    assert drafts.propose(batch_of("a", "b")).tolist() == [[7, 8, -1, -1], [4, 5, 6, -1]]
    assert drafts.kinds[:2].tolist() == [LOOKED, LINED] and drafts.drafted[0, 1].tolist()[:2] == [-1, -1]
    drafts.factors[LINED] = 0.1
    drafts.propose(batch_of("a", "b"))
    assert drafts.kinds[:2].tolist() == [LOOKED, LOOKED], "lines have not held lately"


def test_a_model_whose_drafts_nobody_wants_runs_its_first_pass_alone(drafts: DeviceDrafts) -> None:
    asked: list[tuple[int, bool]] = []

    def model(batch: SimpleNamespace, *, dummy_run: bool, num_speculative_tokens: int) -> torch.Tensor:
        asked.append((num_speculative_tokens, dummy_run))
        # behind what it was asked for, what it drafted before
        return torch.tensor([[7, 8, 9]] * batch.num_reqs)

    def drafted(levels: int, *told: Any, may_branch: bool) -> tuple[torch.Tensor, ...]:
        tokens = torch.tensor([[7, 8][:levels] + [-1] * (WIDTH - min(levels, 2))]).int()
        return tokens, torch.arange(-1, WIDTH - 1)[None].int(), torch.tensor([[0.9, 0.8, 0.0, 0.0]])

    seen: list[list[list[int]]] = []
    drafts._propose, drafts._depth = model, 3
    drafts.model = SimpleNamespace(drafted=drafted, learn=lambda: None, beams=None)
    drafts.model.watch = lambda batch, tokens: seen.append(tokens.tolist())
    assert drafts.propose(batch_of("a")).tolist() == [[7, 8, -1, -1]]
    drafts.is_covered = True
    assert drafts.propose(batch_of("a")).tolist() == [[7, -1, -1, -1]]
    drafts.propose(batch_of("a"), dummy_run=True)
    assert asked == [(3, False), (1, False), (3, True)] and drafts.kinds[0] == MODELLED
    assert seen == [[[7, 8, 9]], [[7]]], "what it drafted is what it learns of"


def test_whose_verdict_is_withheld_is_kept_with_its_draft_until_its_next_one(drafts: DeviceDrafts) -> None:
    for row in (0, 1):
        carry(drafts, row, 3, [4, 5, 6, 7])
    asked: list[list[str]] = []
    drafts.withhold = lambda names: asked.append(names) or "b"
    drafts.propose(batch_of("b", "a"))
    assert asked == [["b", "a"]] and drafts.kinds[:2].tolist() == [LINED, WITHHELD + LINED]
    # by the step's order, whatever it was when the drafts were made
    assert drafts.withheld(batch_of("a", "b")).tolist() == [False, True]
    home = drafts.home(batch_of("a", "b"), rows_are_on_device=False)
    assert home[:, -1].tolist() == [LINED, WITHHELD + LINED]
    drafts.withhold = lambda names: "somebody who has left"
    drafts.propose(batch_of("a", "b"))
    assert drafts.withheld(batch_of("a", "b")).tolist() == [False, False]


def test_a_paused_engine_drafts_nothing_and_leaves_nothing_of_what_was(drafts: DeviceDrafts) -> None:
    carry(drafts, 0, 3, [4, 5, 6, 7])
    drafts.propose(batch_of("a"))
    drafts.is_paused = True
    assert drafts.propose(batch_of("a")).tolist() == [[-1] * 4] and (drafts.drafted[0, 0] == -1).all()


def test_what_fails_costs_a_step_its_drafts(drafts: DeviceDrafts) -> None:
    carry(drafts, 0, 3, [4, 5, 6, 7])
    drafts._guard, drafts.looks_up = Guard(is_strict=False), True
    drafts.look_up = lambda *asked: 1 // 0
    assert drafts.propose(batch_of("a")).tolist() == [[-1] * 4]
    assert drafts._guard.failures == {"drafting": 1}


def test_a_lookup_is_told_where_a_request_its_problem_and_its_siblings_are(drafts: DeviceDrafts) -> None:
    drafts.known["a"] = Told(-1, (), NOBODY.ends, 4, True)
    drafts.known["b"] = Told(5, ("a", "gone"), NOBODY.ends, 2, False)
    drafts.told.renew(["a", "b", "gone"])
    asked = drafts.told.asked(np.array([1, 0]), 3, may_branch=True)
    assert asked.texts.tolist() == [[1, 5, 0, *[-1] * (SIBLINGS[1] - 1)], [0, -1, *[-1] * SIBLINGS[1]]]
    assert asked.limits.tolist() == [2, 3] and asked.branches.tolist() == [1, 0]
    assert not drafts.told.asked(np.array([1]), 3, may_branch=False).branches.any()
    drafts._states.add("one more")
    drafts.known["b"] = Told(-1, ("one more",) * (SIBLINGS[-1] + 1), NOBODY.ends, 4, True)
    drafts.told.renew(["b"])
    texts = drafts.told.asked(np.array([1]), 3, may_branch=True).texts
    assert texts.tolist() == [[1, -1, *[2] * SIBLINGS[-1]]], "some go without"


def test_who_has_more_ends_than_anybody_before_is_told_of_all_of_them(drafts: DeviceDrafts) -> None:
    drafts.known["b"] = Told(-1, (), np.arange(20, 25, dtype=np.int32), 4, True)
    drafts.told.renew(["a", "b"])
    ends = drafts.told.asked(np.array([0, 1]), 3, may_branch=True).ends
    assert ends.shape == (2, 16) and ends[0].tolist() == [9] + [-1] * 15
    assert ends[1].tolist() == [20, 21, 22, 23, 24] + [-1] * 11
    drafts.known["b"] = NOBODY
    drafts.told.renew(["b"])
    assert drafts.told.asked(np.array([1]), 3, may_branch=True).ends.max() == -1


def test_who_is_held_is_drafted_for_as_soon_as_it_is_not(drafts: DeviceDrafts) -> None:
    for row in (0, 1):
        carry(drafts, row, 3, [4, 5, 6, 7])
    drafts.held = lambda: ["b", "gone"]
    assert drafts.propose(batch_of("b", "a")).tolist() == [[-1] * 4, [4, 5, 6, 7]]
    drafts.held = tuple
    assert drafts.propose(batch_of("b", "a")).tolist() == [[4, 5, 6, 7]] * 2


def test_what_comes_home_is_what_the_step_had(drafts: DeviceDrafts) -> None:
    carry(drafts, 1, 3, [4, 5, 6, 7])
    drafts.propose(batch_of("a", "b"))
    batch = batch_of("b", "a", starts=[0, 3, 4])
    words = drafts.home(batch, rows_are_on_device=True)
    assert words[:, :WIDTH].tolist() == [[4, 5, 6, 7], [-1] * 4]
    assert words[0, -2] == LINED and words[:, -1].tolist() == [2, 0], "rows that it had, whatever was drafted"
    assert drafts.home(batch, rows_are_on_device=False).tolist() == words[:, :-1].tolist()
