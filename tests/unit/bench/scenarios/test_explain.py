"""Which requests `--explain` tells of, and how a stretch reads."""

from dataclasses import replace

from rich.console import Console

from bench.policy.reward import problems
from bench.runner.report import print_all
from bench.runner.stretches import Stretch
from bench.scenarios.rollout import Explained, explained_text, reasons_text, slowest
from tests.unit.report.test_walk import recorded

ANSWERS = {"a": list(range(1, 20)), "b": list(range(100, 112))}


def test_the_slowest_ended_last_and_their_steps_are_those_of_that_round(make_run):
    rollout, trace = recorded(ANSWERS, ("v2", False), frozenset())
    # what was recorded is all of one problem
    chosen = [replace(problems(1, 0)[0], problem_id="p")]
    run = make_run([ANSWERS["b"], ANSWERS["a"]], [1.0, 1.0], [2.0, 3.0])
    found = slowest(run, trace, -1, chosen, 2, 2)
    assert [(one.answer, one.num_tokens, one.finish_s) for one in found] == [(2, 19, 3.0), (1, 12, 2.0)]
    for one in found:
        assert (one.stretches[0].first, one.stretches[-1].end) == (0, one.num_tokens)
        assert one.stretches[0].begin_ms == 0.0 and "prompt" in one.stretches[0].reasons
    assert sum(stretch.nodes for one in found for stretch in one.stretches) == sum(rollout.nodes) > 0
    unknown = make_run([[7, 7, 7]], [1.0], [2.0])
    assert slowest(unknown, trace, -1, chosen, 1, 1)[0].stretches == ()


def test_lines_hold_means_of_steps():
    pays = Stretch(1, 9, 1500.0, 1600.0, {"pays": 4}, 12, 6, 8)
    off = Stretch(9, 12, 1600.0, 1700.0, {"off: batch": 3, "nothing proposed": 1}, 0, 0, 4)
    facts = {"problem_id": "sum-1", "answer": 1, "num_tokens": 12, "finish_s": 4.0}
    out = Console(width=160)
    with out.capture() as capture:
        print_all(explained_text([Explained(stretches=own, **facts) for own in ((pays, off), ())]), out)
    text = capture.get()
    lines = [line.split("│") for line in text.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line[1:-1]] for line in lines]
    assert ["1-9", "1.50", "2", "pays", "4", "3.0", "1.5", "25.0"] in cells
    assert ["9-12", "1.60", "1", "off: batch 75 %, nothing proposed 25 %", "4", "0.0", "0.0", "25.0"] in cells
    assert "12 tokens in 8 steps, done at 4.00 s (begun at 1.50 s)" in text
    assert "the recording has not seen it" in text


def test_rare_reasons_are_summed_up():
    assert reasons_text({"a": 4}) == "a"
    assert reasons_text({"a": 1, "b": 5, "c": 2, "d": 1, "e": 1}) == "b 50 %, c 20 %, a 10 %, other 20 %"
