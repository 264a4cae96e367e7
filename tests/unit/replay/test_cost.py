from dataclasses import replace

import pytest
from msgspec import structs

from tests.unit.replay.builders import LINE, decode_step, header, trace_of
from vllm_specrollout.budgets.step_cost import Timing
from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.replay.cost import cost_of
from vllm_specrollout.replay.records import Arrival, Step, Trace


def recorded(count: int = 200, disturbed: int = 0) -> Trace:
    """Steps whose times are exactly on LINE, but for the disturbed ones."""
    steps = [Step(at_ms=0.0, ask_ms=0.1, views=1)]
    for i in range(count):
        batch, nodes, branches = 1 + i % 7, (i * 5) % 24, (i * 3) % 5
        nodes, branches = (0, 0) if i % 4 == 0 else (nodes + 1, branches)
        ms = LINE.step_ms(decode_step(batch, nodes, branches), asked=batch) * (8.0 if i < disturbed else 1.0)
        timing = Timing(batch, batch + nodes, nodes, branches, batch, ms, True)
        steps.append(Step(at_ms=0.0, ask_ms=0.1, views=batch, timing=timing))
    return replace(trace_of([[1, 2]]), header=header(8, None), arrivals=(), steps=tuple(steps))


@pytest.mark.parametrize("disturbed", [0, 15])
def test_a_line_is_found_again_in_steps_that_lie_on_it_and_a_few_that_do_not(disturbed: int) -> None:
    line = cost_of(recorded(disturbed=disturbed))
    for batch, nodes, branches in ((1, 0, 0), (4, 0, 0), (7, 12, 2), (1, 24, 4), (64, 200, 20)):
        step = decode_step(batch, nodes, branches)
        assert line.step_ms(step, asked=batch) == pytest.approx(LINE.step_ms(step, asked=batch), rel=0.03)


def test_what_drafters_take_is_paid_only_where_they_are_asked() -> None:
    line = cost_of(recorded())
    assert line.ask_ms(4) == pytest.approx(0.1, rel=0.05)


def test_prompts_cost_what_the_steps_that_computed_them_cost_beyond_decoding() -> None:
    trace = recorded()
    steps, arrivals = list(trace.steps), []
    for step in (20, 60, 100):
        # the prompt of one request more, 40 rows of it where its length is 50: the rest was in the prefix cache
        timing = steps[step + 1].timing
        ms = timing.step_ms + LINE.request + 40 * 0.3
        grown = structs.replace(timing, batch=timing.batch + 1, rows=timing.rows + 40, is_decode_only=False, step_ms=ms)
        steps[step + 1] = structs.replace(steps[step + 1], timing=grown)
        arrivals.append(Arrival(request=len(arrivals), step=step, num_prompt_tokens=50, max_tokens=9))
    line = cost_of(replace(trace, steps=tuple(steps), arrivals=tuple(arrivals)))
    assert line.prompt_share == pytest.approx(0.8)
    assert line.prompt + 40 * line.prompt_row == pytest.approx(12.0, rel=0.1)


def test_no_term_is_negative_and_a_line_in_the_header_needs_no_steps() -> None:
    falling = recorded()
    steps = [
        structs.replace(s, timing=structs.replace(s.timing, step_ms=30.0 - s.timing.batch)) if s.timing else s
        for s in falling.steps
    ]
    terms = structs.asdict(cost_of(replace(falling, steps=tuple(steps))))
    assert min(*terms.pop("rows"), *terms.values()) >= 0.0
    assert cost_of(trace_of([[1]])) == LINE


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(SpecRolloutError, match="has 3 timed decode steps, and a cost line needs 8"):
        cost_of(recorded(3))


def test_the_measured_makespan_counts_the_last_step_that_no_policy_was_told_of() -> None:
    timing = Timing(1, 1, 0, 0, 1, 10.0, True)
    steps = (Step(at_ms=9.0), Step(at_ms=19.5, timing=timing), Step(at_ms=30.0, timing=timing))
    trace = replace(trace_of([[1]]), steps=steps)
    assert trace.measured_ms() == pytest.approx(10.0 + 10.0 + 10.5)
