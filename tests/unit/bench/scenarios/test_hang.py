"""What is made of the steps of a run in which something stood still."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from bench.scenarios.hang import DISK, judged
from vllm_specrollout.errors import ConfigError

USUAL = [(0.01 * i, 10.0, 2, 6, 5) for i in range(9)]
LIMITS = {1: 4.0, 2: 5.0}
HANG = {"begin": 10.025, "end": 10.065}


def steps(**times):
    """Ten steps of 10 ms, of which some took another time; those without drafts are the ones while it hangs."""
    return [(10.01 + 0.01 * i, times.get(f"step_{i}", 10.0), 2, 0 if 2 <= i <= 5 else 6, 2 + i % 2) for i in range(10)]


def test_steps_are_told_apart_by_when_they_were_over():
    row = judged(DISK, USUAL, steps(step_1=80.0, step_3=24.0, step_9=70.0), HANG, LIMITS)
    assert {name: part.steps for name, part in row.parts.items()} == {"usual": 9, "before": 2, "during": 5, "after": 3}
    assert [part.longest_ms for part in row.parts.values()] == [10.0, 80.0, 24.0, 70.0]
    assert asdict(row.parts["before"])["drafted"] == 3.0 and row.parts["during"].drafted == pytest.approx(6 / 10)
    assert row.parts["usual"].tokens == 2.5 and row.hang_s == pytest.approx(0.04)
    # two usual steps and what a drafter may take
    assert row.most_ms == 25.0 and row.passed


def test_one_step_that_takes_too_long_is_told():
    assert judged(DISK, USUAL, steps(step_6=26.0), HANG, LIMITS).passed is False


def test_drafts_that_do_not_come_again_are_told():
    silent = [(end, ms, batch, nodes if end < 10.05 else 0, tokens) for end, ms, batch, nodes, tokens in steps()]
    assert judged(DISK, USUAL, silent, HANG, LIMITS).passed is False


@pytest.mark.parametrize("hang", [{}, {"begin": 10.02}, {"begin": 10.02, "end": 10.2}])
def test_a_run_that_is_over_too_soon_is_refused(hang):
    with pytest.raises(ConfigError, match="was over before the disk came back"):
        judged(DISK, USUAL, steps(), hang, LIMITS)
