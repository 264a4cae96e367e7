"""Segments become fewer and lose nothing."""

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.observe.story import is_gapless, reasons_of, step, steps_of, totals, written
from vllm_specrollout.observe.timeline import MOST_SEGMENTS, summarise


def test_like_steps_become_one_segment_and_a_new_reason_begins_another():
    found = written(
        [step(1, "pays", 6, 2, 1.0), step(4, "pays", 4, 1, 2.0), step(6, "off: x", end_s=3.0), step(7, "pays")]
    )
    assert [(one.first, one.end, one.reasons) for one in found] == [
        (1, 6, {"pays": 2}),
        (6, 7, {"off: x": 1}),
        (7, 8, {"pays": 1}),
    ]
    assert (found[0].nodes, found[0].accepted, found[0].end_s) == (10, 3, 2.0)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=700))
def test_a_story_of_any_length_is_kept_in_few_segments(reasons):
    found = written(steps_of(reasons))
    assert len(found) <= MOST_SEGMENTS
    assert totals(found) == totals(steps_of(reasons))
    assert reasons_of(found) == {reason: reasons.count(reason) for reason in reasons}
    assert is_gapless(found) and (found[0].first, found[-1].end) == (0, len(reasons))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60), st.integers(1, 12))
def test_a_summary_keeps_every_sum_and_leaves_its_input_alone(reasons, most):
    steps = steps_of(reasons)
    found = summarise(steps, most)
    assert len(found) == min(most, len(steps))
    assert totals(found) == totals(steps) and is_gapless(found)
    assert all(one.steps == 1 for one in steps)


def test_steps_that_alternate_are_joined_and_a_phase_of_its_own_stays():
    alternating = ["pays", "nothing proposed"] * 10
    found = summarise(written(steps_of([*alternating, *["off: drafts do not pay"] * 8, *alternating])), 3)
    assert [one.reasons for one in found] == [
        {"pays": 10, "nothing proposed": 10},
        {"off: drafts do not pay": 8},
        {"pays": 10, "nothing proposed": 10},
    ]
