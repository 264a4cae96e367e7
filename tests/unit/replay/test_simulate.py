from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from bench.replay.synthetic import TracePlan, make_trace
from tests.unit.replay.builders import LINE, ScriptedBudget, decode_step, header, trace_of, tree
from vllm_specrollout.budgets.registry import make_budget, names
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.replay.records import Candidates
from vllm_specrollout.replay.simulate import replay
from vllm_specrollout.types import FinishReason

# after one token of the answer 1 2 3 4 5 the draft 2 3 9 holds for two tokens, and the third comes with them
DRAFTS = Candidates.of(0, 1, tree([2, 3, 9], [-1, 0, 1])), Candidates.of(0, 4, tree([8], [-1]))
BY_HAND = [[1, 2, 3, 4, 5], [7]], DRAFTS


def budget(name: str, nodes: int = 8, depth: int = 8, seed: int = 0):
    return make_budget(SpecRolloutConfig(budget=name, max_draft_tokens=nodes, max_depth=depth), seed=seed)


def test_a_rollout_worked_out_by_hand_takes_exactly_that_long():
    """The example of docs/guides/replay.md."""
    result = replay(trace_of(*BY_HAND), ScriptedBudget(3, 3))
    # prompts: two requests, 20 rows, both asked for          10 + 2*1 + 20*0.01 + 0.1         = 12.3; 1 and 7 come
    # request 0 alone, three nodes, asked for again           10 + 1 + 2 + 3*0.5 + 0.1         = 14.6; 2 3 4 come
    # one node, in vain; the answer ends in it                10 + 1 + 2 + 0.5 + 0.1           = 13.6; 5 comes
    assert result.step_ms == pytest.approx((12.3, 14.6, 13.6))
    assert result.makespan_ms == pytest.approx(40.5)
    assert result.nodes == (0, 3, 1)
    assert (result.steps, result.steps_off, result.drafted, result.accepted) == (3, 1, 4, 2)
    assert result.tokens_per_step == 2.0
    assert result.finish_ms == pytest.approx((40.5, 12.3))


def test_a_budget_learns_of_a_step_one_step_late_and_of_an_ending_before_it() -> None:
    budget = ScriptedBudget(3, 3)
    replay(trace_of(*BY_HAND), budget)
    order = [name for name, _ in budget.calls]
    # the first step's record comes at the end of the second, in which the second request is over
    assert order[:6] == ["limits", "choose", "finish", "observe", "limits", "choose"]
    first, second = budget.of("observe")[:2]
    assert first.plan is None and first.timing.step_ms == pytest.approx(12.3)
    assert not first.timing.is_decode_only and first.timing.tokens == 2
    assert second.plan is not None and second.timing.nodes == 3 and second.timing.tokens == 3
    assert second.timing.trees == 1 and second.timing.ask_ms == pytest.approx(0.1)
    ending = budget.of("finish")[0]
    assert ending.token_ids.tolist() == [7] and ending.status is FinishReason.FINISHED


def test_on_the_second_runner_a_step_is_learned_of_at_once() -> None:
    trace = trace_of([[1, 2, 3]])
    budget = ScriptedBudget()
    replay(replace(trace, header=header(runner="v2")), budget)
    assert [record.timing.step_ms for record in budget.of("observe")] == pytest.approx([11.1, 11.1, 11.1])
    assert [name for name, _ in budget.calls][:4] == ["observe", "limits"] * 2


def test_a_record_names_the_accepted_nodes_and_what_was_planned() -> None:
    budget = ScriptedBudget(max_nodes=4, max_depth=3)
    branching = tree([9, 2, 3], [-1, -1, 1])
    replay(trace_of([[1, 2, 3, 4, 5, 6]], [Candidates.of(0, 1, branching)]), budget)
    record = budget.of("observe")[1]
    # the drafter is as sure of 9 as of 2, and 9 stands first
    assert record.trees.token_ids.tolist() == [9, 2, 3] and record.timing.branches == 1
    assert record.result.num_accepted.tolist() == [2] and record.result.accepted.tolist() == [1, 2]
    assert record.plan.trees is record.trees and record.batch.request_ids == ["r0"]


def test_the_drafts_of_an_answer_that_is_over_are_not_verified() -> None:
    budget = ScriptedBudget(max_nodes=4, max_depth=4)
    drafts = [Candidates.of(0, 1, tree([2, 3], [-1, 0])), Candidates.of(1, 1, tree([2, 3], [-1, 0]))]
    result = replay(trace_of([[1], [1, 2, 3, 4, 5]], drafts), budget)
    record = budget.of("observe")[1]
    assert record.plan.trees.sizes.tolist() == [2, 2] and record.trees.sizes.tolist() == [0, 2]
    assert (result.drafted, result.accepted) == (2, 2)


def test_a_budget_that_is_off_for_a_step_is_not_asked_for_limits() -> None:
    trace = trace_of([[1, 2, 3, 4]], [Candidates.of(0, 1, tree([2], [-1])), Candidates.of(0, 2, tree([3], [-1]))])
    budget = ScriptedBudget(off=[0])
    result = replay(trace, budget)
    assert result.nodes == (0, 0, 1) and budget.asked == 3
    assert result.step_ms[0] == pytest.approx(10.0 + 1.0 + 10 * LINE.prompt_row)


def test_drafters_are_left_alone_after_four_steps_that_did_not_pay() -> None:
    budget = ScriptedBudget()
    budget.backs_off = True
    replay(trace_of([list(range(12))]), budget)
    # nothing is ever proposed: asked in steps 0 to 3 and 8
    assert len(budget.of("limits")) == 5 and budget.asked == 5


def test_recorded_drafters_are_asked_as_one_or_not_at_all() -> None:
    mixed = replace(tree([2, 9, 3], [-1, -1, 0]), source=np.asarray([1, 0, 1], dtype=np.int32))
    trace = trace_of([[1, 2, 3, 4]], [Candidates.of(0, 1, mixed)])
    asked, alone = ScriptedBudget(8, 8, drafters=0b01), ScriptedBudget(8, 8, drafters=0b10)
    result = replay(trace, asked)
    (proposal,), draft_ms = asked.of("choose")[0]
    assert proposal.token_ids.tolist() == [2, 9, 3] and proposal.source.tolist() == [1, 0, 1]
    assert draft_ms == pytest.approx(LINE.ask) and result.drafted == 3
    # nobody has the second place, so nothing is asked, and nothing is paid for
    result = replay(trace, alone)
    assert not alone.of("choose") and result.drafted == 0
    assert result.step_ms[1] == pytest.approx(LINE.fixed + LINE.request)


def test_without_drafts_a_rollout_is_the_sum_of_its_plain_steps():
    trace = make_trace(TracePlan(requests=9, batch=4, median=20, seed=3))
    result = replay(trace, budget("off"))
    assert result.steps == result.steps_off and result.tokens_per_step == 1.0 and result.drafted == 0
    # the same rollout, one token a step, written down in the simplest way
    queue = [len(trace.ends[i].token_ids) for i in range(9)]
    left, total, line = [], 0.0, TracePlan().cost
    while queue or left:
        admitted = [queue.pop(0) for _ in range(min(4 - len(left), len(queue)))]
        left += admitted
        total += line.step_ms(decode_step(len(left)), 64 * len(admitted))
        left = [n - 1 for n in left if n > 1]
    assert result.makespan_ms == pytest.approx(total)


def test_a_wait_in_which_nobody_is_there_counts_for_the_makespan_alone():
    trace = make_trace(TracePlan(requests=2, batch=4, median=20, seed=3))
    first, second = trace.arrivals
    late = replace(trace, arrivals=(first, structs.replace(second, ready_ms=60_000.0)))
    result = replay(late, budget("off"))
    assert result.makespan_ms > 60_000.0 > 10 * result.busy_ms > 0.0
    assert result.makespan_ms - result.busy_ms == pytest.approx(60_000.0 - result.finish_ms[0])


@pytest.mark.parametrize("name", names())
def test_every_budget_yields_every_token_and_the_same_replay_twice(name: str):
    trace = make_trace(TracePlan(requests=10, batch=4, median=30, sibling=0.3, seed=5))
    first, second = (replay(trace, budget(name, nodes=16, seed=1)) for _ in range(2))
    assert first == second
    total = sum(len(end.token_ids) for end in trace.ends.values())
    assert first.decode_tokens == total - 10
    assert len(first.finish_ms) == 10 and max(first.finish_ms) == first.makespan_ms


def test_a_draft_that_is_always_right_needs_one_step_in_nine():
    plan = TracePlan(requests=1, batch=1, median=91, spread=0.0, acceptance=(1.0,) * 8, seed=0)
    result = replay(make_trace(plan), budget("fixed"))
    # the first token comes with the prompt, then 90 in tens less one
    assert result.steps == 1 + 10 and result.wasted_nodes == 0


def test_a_request_waits_until_it_exists_and_until_there_is_a_place():
    trace = trace_of([[1], [2], [3]], batch=2)
    late = structs.replace(trace.arrivals[2], ready_ms=500.0)
    result = replay(replace(trace, arrivals=(*trace.arrivals[:2], late)), budget("off"))
    assert result.finish_ms[1] < 20.0 and result.finish_ms[2] == pytest.approx(500.0 + 11.1)
    crowded = replay(trace_of([[1], [2], [3]], batch=1), budget("off"))
    assert crowded.steps == 3


def test_a_prompt_beyond_the_steps_room_is_computed_in_pieces():
    trace = trace_of([[1, 2]], prompt=25)
    result = replay(replace(trace, header=header(max_num_batched_tokens=10)), budget("off"))
    assert result.step_ms == pytest.approx((11.1, 11.1, 11.05, 11.0))


def test_a_trace_without_a_single_end_is_refused():
    trace = replace(trace_of([[1]]), ends={})
    with pytest.raises(SpecRolloutError, match="no request of the trace has an end"):
        replay(trace, ScriptedBudget(), LINE)


def test_end_tokens_that_were_recorded_as_drafts_are_not_verified_where_the_arrival_names_them() -> None:
    trace = trace_of([[1, 2, 9]], [Candidates.of(0, 1, tree([2, 9, 5, 6], [-1, 0, 1, 0]))])
    named = replace(trace, arrivals=(structs.replace(trace.arrivals[0], ends=(9,)),))
    proposed = []
    for own in (trace, named):
        budget = ScriptedBudget(max_nodes=4, max_depth=4)
        steps = replay(own, budget).steps
        (first,), _ = budget.of("choose")[0]
        proposed.append((steps, first.token_ids.tolist()))
    # the end comes out of its parent's row, so there are as many steps
    assert proposed == [(2, [2, 9, 5, 6]), (2, [2, 6])]
