from dataclasses import replace

import numpy as np
import pytest
from vllm_specrollout.policies import presets

from tests.unit.replay.builders import LINE, Scripted, header, trace_of, tree
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.replay.cost import Load
from vllm_specrollout.replay.records import Candidates
from vllm_specrollout.replay.simulate import accepted_nodes, replay
from vllm_specrollout.replay.synthetic import Plan, make_trace
from vllm_specrollout.types import Status


def budget(name: str, nodes: int = 8, depth: int = 8, seed: int = 0):
    return presets.make_policy(SpecRolloutConfig(budget=name, max_draft_tokens=nodes, max_depth=depth), seed=seed)


def test_a_rollout_worked_out_by_hand_takes_exactly_that_long():
    """The example of docs/guides/replay.md."""
    drafts = [
        # after one token of the answer 1 2 3 4 5: the draft 2 3 9 holds for two tokens, the third comes with them
        Candidates(0, 1, tree([2, 3, 9], [-1, 0, 1])),
        Candidates(0, 4, tree([8], [-1])),
    ]
    policy = Scripted(max_nodes=3, max_depth=3)
    result = replay(trace_of([[1, 2, 3, 4, 5], [7]], drafts), policy)
    # prompts: two requests, 20 rows, both asked for          10 + 2*1 + 20*0.01 + 0.1         = 12.3; 1 and 7 come
    # request 0 alone, three nodes, asked for again           10 + 1 + 2 + 3*0.5 + 0.1         = 14.6; 2 3 4 come
    # one node, in vain; the answer ends in it                10 + 1 + 2 + 0.5 + 0.1           = 13.6; 5 comes
    assert result.step_ms == pytest.approx((12.3, 14.6, 13.6))
    assert result.makespan_ms == pytest.approx(40.5)
    assert result.nodes == (0, 3, 1)
    assert (result.steps, result.steps_off, result.drafted, result.accepted) == (3, 1, 4, 2)
    assert result.tokens_per_step == 2.0
    assert result.finish_ms == pytest.approx((40.5, 12.3))


def test_a_policy_learns_a_steps_time_one_step_late_and_an_ending_before_the_next_step():
    policy = Scripted(max_nodes=3, max_depth=3)
    replay(trace_of([[1, 2, 3, 4, 5], [7]], [Candidates(0, 1, tree([2, 3, 9], [-1, 0, 1]))]), policy)
    assert policy.timings[0] is None
    assert policy.timings[1].step_ms == pytest.approx(12.3)
    assert not policy.timings[1].is_decode_only and policy.timings[1].tokens == 2
    assert policy.timings[2].nodes == 3 and policy.timings[2].tokens == 3 and policy.timings[2].trees == 1
    order = [name if name != "finish" else value for name, value in policy.calls]
    assert order[:5] == ["observe", "decide", "choose", "r1", "observe"]
    assert policy.endings[0].token_ids.tolist() == [7] and policy.endings[0].status is Status.FINISHED


def test_on_the_second_runner_a_step_and_its_time_are_learned_together():
    trace = trace_of([[1, 2, 3]])
    policy = Scripted()
    replay(replace(trace, header=header(runner="v2")), policy)
    assert [timing.step_ms for timing in policy.timings] == pytest.approx([11.1, 11.1, 11.1])


def test_feedback_names_the_accepted_nodes_of_the_tree_that_was_verified():
    policy = Scripted(max_nodes=4, max_depth=3)
    branching = tree([9, 2, 3], [-1, -1, 1])
    replay(trace_of([[1, 2, 3, 4]], [Candidates(0, 1, branching)]), policy)
    (feedback,) = policy.feedback[1]
    assert feedback.accepted_nodes.tolist() == [1, 2] and feedback.drafted == 3 and feedback.batch == 1


def test_without_drafts_a_rollout_is_the_sum_of_its_plain_steps():
    trace = make_trace(Plan(requests=9, batch=4, median=20, seed=3))
    result = replay(trace, budget("off"))
    assert result.steps == result.steps_off and result.tokens_per_step == 1.0 and result.drafted == 0
    # the same rollout, one token a step, written down in the simplest way
    queue = [len(trace.ends[i].token_ids) for i in range(9)]
    left, total, line = [], 0.0, Plan().cost
    while queue or left:
        admitted = [queue.pop(0) for _ in range(min(4 - len(left), len(queue)))]
        left += admitted
        total += line.step_ms(Load(batch=len(left), prompt_rows=64 * len(admitted)))
        left = [n - 1 for n in left if n > 1]
    assert result.makespan_ms == pytest.approx(total)


@pytest.mark.parametrize("name", presets.names())
def test_every_budget_yields_every_token_and_the_same_replay_twice(name: str):
    trace = make_trace(Plan(requests=10, batch=4, median=30, sibling=0.3, seed=5))
    first, second = (replay(trace, budget(name, nodes=16, seed=1)) for _ in range(2))
    assert first == second
    total = sum(len(end.token_ids) for end in trace.ends.values())
    assert first.decode_tokens == total - 10
    assert len(first.finish_ms) == 10 and max(first.finish_ms) == first.makespan_ms


def test_a_draft_that_is_always_right_needs_one_step_in_nine():
    plan = Plan(requests=1, batch=1, median=91, spread=0.0, acceptance=(1.0,) * 8, seed=0)
    result = replay(make_trace(plan), budget("fixed"))
    # the first token comes with the prompt, then 90 in tens less one
    assert result.steps == 1 + 10 and result.wasted_nodes == 0


def test_a_request_waits_until_it_exists_and_until_there_is_a_place():
    trace = trace_of([[1], [2], [3]], batch=2)
    late = replace(trace.arrivals[2], ready_ms=500.0)
    result = replay(replace(trace, arrivals=(*trace.arrivals[:2], late)), budget("off"))
    assert result.finish_ms[1] < 20.0 and result.finish_ms[2] == pytest.approx(500.0 + 11.1)
    crowded = replay(trace_of([[1], [2], [3]], batch=1), budget("off"))
    assert crowded.steps == 3


def test_a_prompt_beyond_the_steps_room_is_computed_in_pieces():
    trace = trace_of([[1, 2]], prompt=25)
    result = replay(replace(trace, header=header(max_num_batched_tokens=10)), budget("off"))
    assert result.step_ms == pytest.approx((11.1, 11.1, 11.05, 11.0))


def test_a_walk_follows_siblings_and_stops_at_the_first_token_that_nobody_drafted():
    branching = tree([5, 6, 7, 8], [-1, -1, 1, 0])
    assert accepted_nodes(branching, np.asarray([6, 7, 1], dtype=np.int32)) == [1, 2]
    assert accepted_nodes(branching, np.asarray([1], dtype=np.int32)) == []
    assert accepted_nodes(branching, np.asarray([], dtype=np.int32)) == []


def test_a_trace_without_a_single_end_is_refused():
    trace = replace(trace_of([[1]]), ends={})
    with pytest.raises(SpecRolloutError, match="no request of the trace has an end"):
        replay(trace, Scripted(), LINE)
