"""Which requests `--explain` tells of, and how a stretch reads."""

from dataclasses import asdict, replace

import pytest
from rich.console import Console

from bench.policy.reward import problems
from bench.runner.report import print_all
from bench.scenarios.rollout import explained_text, reasons_text, slowest
from vllm_specrollout.observe.timeline import Segment

PAYS = Segment(1, 9, 0.5, 0.6, {"pays": 4}, 12, 6, 7.0, 4, 100.0, 80.0, 8)
OFF = Segment(9, 14, 0.6, 0.7, {"off: batch": 3, "nothing proposed": 1}, batch=4)


@pytest.fixture
def rollout(make_run):
    """Two problems, two answers each; the third request ends last, the first just before it."""
    return make_run([[0] * 5, [0] * 3, [0] * 12, [0]], [1.0, 2.0, 3.0, 4.0], [3.0, 2.0, 4.0, 1.0])


def told(**stretches):
    return [{"name": name[1:], "stretches": [asdict(one) for one in own]} for name, own in stretches.items()]


def test_the_slowest_ended_last_and_the_story_is_told_in_the_runs_own_time(rollout):
    chosen = problems(2, 0)
    found = slowest(rollout, told(_2=[PAYS, OFF], _1=[PAYS]), chosen, 2, 2)
    assert [(one.problem_id, one.answer, one.num_tokens, one.finish_s) for one in found] == [
        (chosen[1].problem_id, 1, 12, 4.0),
        (chosen[0].problem_id, 1, 5, 3.0),
    ]
    assert [(one.begin_s, one.end_s) for one in found[0].stretches] == [(1.5, 1.6), (1.6, 1.7)]
    # the engine stopped within the last step's tokens
    assert found[0].stretches[-1].end == 12
    assert found[1].stretches == ()


def test_a_long_story_is_told_in_twelve_lines(rollout):
    steps = [replace(PAYS, first=i, end=i + 1, reasons={"ab"[i % 2]: 1}) for i in range(40)]
    (found,) = slowest(rollout, told(_2=steps), problems(2, 0), 2, 1)
    assert len(found.stretches) == 12 and sum(one.steps for one in found.stretches) == 40


def test_lines_hold_means_of_steps_and_a_dash_where_nothing_was_expected(rollout):
    out = Console(width=160)
    with out.capture() as capture:
        print_all(explained_text(slowest(rollout, told(_2=[PAYS, OFF]), problems(2, 0), 2, 2)), out)
    lines = [line.split("│") for line in capture.get().splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line[1:-1]] for line in lines]
    assert ["1-9", "1.50", "2", "pays", "4", "3.0", "1.5", "1.8", "25.0", "25.0 (20.0)"] in cells
    off = "off: batch 75 %, nothing proposed 25 %"
    assert ["9-12", "1.60", "1", off, "4", "0.0", "0.0", "-", "25.0", "-"] in cells
    text = capture.get()
    assert "12 tokens in 8 steps, done at 4.00 s (begun at 1.50 s)" in text
    assert "the budget was never asked" in text


def test_rare_reasons_are_summed_up():
    assert reasons_text({"a": 4}) == "a"
    assert reasons_text({"a": 1, "b": 5, "c": 2, "d": 1, "e": 1}) == "b 50 %, c 20 %, a 10 %, other 20 %"
