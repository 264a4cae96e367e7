"""Figures of an RL loop: summed up per epoch, per generated token, and none of answers that differ."""

import io

import pytest
from rich.console import Console

from bench.grpo.rows import epoch_rows, epochs_table, step_row
from bench.runner.fields import Row
from bench.runner.report import print_all


def run(engine, wall_s, num_tokens, **changes):
    values = {"steps": 10, "reward": 0.5, "num_differing": 0, "identical": None, "difference": None}
    values |= {"drafted": None, "accepted": None}
    return Row(engine=engine, wall_s=wall_s, num_tokens=num_tokens, **(values | changes))


def row(step, epoch, runs, reward=0.5):
    usual = {"solved": 1.0, "mean_tokens": 10.0, "cut_share": 0.0, "update": {}, "train_s": 1.0, "push_s": 1.0}
    return step_row(runs, step=step, epoch=epoch, weights_version=step, reward=reward, **usual)


GOOD = [run("stock", 10.0, 100), run("ours", 5.0, 100, identical=True)]
BAD = [run("stock", 10.0, 100), run("ours", 5.0, 100, identical=False, num_differing=1, difference="request 0")]


def test_ratios_are_per_generated_token_and_summed_before_they_are_divided():
    runs = [
        [run("stock", 10.0, 100), run("ngram", 8.0, 160), run("ours", 4.0, 100, identical=True)],
        [run("stock", 20.0, 100), run("ngram", 7.0, 40), run("ours", 5.0, 100, identical=True)],
    ]
    (only,) = epoch_rows([row(0, 0, runs[0], reward=0.2), row(1, 0, runs[1], reward=0.4)])
    stock, ngram, ours = only.engines
    assert only.reward == pytest.approx(0.3)
    assert stock.speedup is None and ngram.speedup == pytest.approx((30 / 200) / (15 / 200))
    assert ours.speedup == pytest.approx(30 / 9)
    assert (ours.identical, ngram.identical, ours.tokens_per_step) == (True, None, 10.0)


def test_answers_that_differ_cost_the_epoch_its_speed_and_no_other_epoch():
    first, second, whole, later = (r.engines[1] for r in epoch_rows([row(0, 0, BAD), row(1, 1, GOOD)]))
    assert (first.identical, first.speedup) == (False, None)
    assert (second.identical, second.speedup) == (True, 2.0)
    assert (whole.identical, whole.speedup) == (False, None)
    assert later.speedup == 2.0


def test_no_seconds_are_printed_of_answers_that_differ():
    out = io.StringIO()
    print_all([epochs_table(epoch_rows([row(0, 0, BAD)]))], Console(file=out, width=160))
    assert "10.0 (10)" in out.getvalue() and "- (10)" in out.getvalue() and "5.0" not in out.getvalue()
    assert not row(0, 0, BAD).identical
