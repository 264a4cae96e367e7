"""Stretches of a request are its rows of the walk: they become fewer, and lose nothing."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bench.runner.stretches import Stretch, stretches_of
from tests.unit.report.test_walk import ORDERS, recorded
from vllm_specrollout.report.rollouts import Steps, steps_of
from vllm_specrollout.report.walk import Walk, walk


def story(reasons: list[str]) -> tuple[Walk, Steps]:
    """One request in as many steps, a token each; the step's number says its nodes."""
    count = len(reasons)
    numbers, ones = np.arange(count, dtype=np.int32), np.ones(count, np.int32)
    names = tuple(dict.fromkeys(reasons))
    table = Walk(
        start=np.array([0, count]), step=numbers, gained=ones, nodes=(numbers % 5).astype(np.uint8),
        accepted=np.zeros(count, np.uint8), why=np.array([names.index(one) for one in reasons], np.uint16),
        tree=-ones, reasons=names, trees=(), step_why=np.zeros(count, np.int64),
        proposed_by=np.zeros((count, 1), np.int64), accepted_by=np.zeros((count, 1), np.int64),
    )  # fmt: skip
    times = np.arange(count + 1, dtype=np.float64)
    sums = dict.fromkeys(("running", "waiting", "arrived", "nodes", "accepted", "tokens", "decoding", "decoded"), ones)
    return table, Steps(begin=times[:-1], end=times[1:], is_last=numbers == count - 1, **sums)


def totals(found: list[Stretch]) -> Counter[str]:
    return sum((Counter(one.reasons) for one in found), Counter[str]())


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60), st.integers(1, 12))
def test_however_few_they_are_they_keep_every_sum_and_have_no_gap(reasons, most):
    found = stretches_of(0, *story(reasons), most)
    assert len(found) == min(most, 1 + sum(a != b for a, b in zip(reasons, reasons[1:], strict=False)))
    assert totals(found) == Counter(reasons)
    assert sum(one.nodes for one in found) == sum(i % 5 for i in range(len(reasons)))
    assert sum(one.running for one in found) == sum(one.steps for one in found) == len(reasons)
    assert all((a.end, a.end_ms) == (b.first, b.begin_ms) for a, b in zip(found, found[1:], strict=False))
    assert (found[0].first, found[-1].end) == (0, len(reasons))


def test_steps_that_alternate_are_joined_and_a_phase_of_its_own_stays():
    alternating = ["pays", "nothing proposed"] * 10
    found = stretches_of(0, *story([*alternating, *["off: drafts do not pay"] * 8, *alternating]), 3)
    assert [one.reasons for one in found] == [
        {"pays": 10, "nothing proposed": 10},
        {"off: drafts do not pay": 8},
        {"pays": 10, "nothing proposed": 10},
    ]


@given(st.lists(st.integers(2, 30), min_size=1, max_size=4), st.sampled_from(ORDERS), st.integers(1, 6))
def test_of_a_recorded_rollout_they_are_the_walks_own_rows(lengths, order, most):
    answers = {f"r{i}": [1000 * i + k for k in range(length)] for i, length in enumerate(lengths)}
    _, trace = recorded(answers, order, frozenset({3, 4}))
    table = walk(trace)
    for request, length in enumerate(lengths):
        found = stretches_of(request, table, steps_of(trace, table), most)
        own = slice(table.start[request], table.start[request + 1])
        assert (found[0].first, found[-1].end) == (0, length)
        assert sum(one.steps for one in found) == own.stop - own.start
        assert sum(one.nodes for one in found) == table.nodes[own].sum()
        assert sum(one.accepted for one in found) == table.accepted[own].sum()
        assert all(one.begin_ms <= one.end_ms for one in found)
