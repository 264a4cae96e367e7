"""What a sweep's cells come to. Runs are made by hand."""

from bench.runner.budgets import AUTO, BudgetArm, told
from bench.runner.report import Found
from bench.runner.rows import Judged, Pair, Run
from bench.scenarios import sweep
from bench.scenarios.sweep import Sweep, SweepCell, is_hopeless

THREE, SEVEN = (BudgetArm(name="fixed", max_draft_tokens=n) for n in (3, 7))


def run(seconds, tokens=(1, 2)):
    return Run(token_ids=(tuple(tokens),), finish_s=(seconds,), step_s=(seconds / 2, seconds))


def cell_rows(cell, given, judged=None):
    return sweep.cell_rows(cell, 0, given, {arm: Judged() for arm in given} | (judged or {}))


def pairs(seconds, tokens=(1, 2)):
    return [Pair(stock=run(4.0), ours=run(seconds, tokens))]


def test_auto_is_compared_with_the_fastest_fixed_length() -> None:
    rows = cell_rows(SweepCell(batch=1, accuracy=0.5), {AUTO: pairs(2.0), THREE: pairs(1.0), SEVEN: pairs(3.0)})
    assert (rows[0].speedup, rows[0].auto_to_best, rows[0].best_draft) == (2.0, 0.5, 3)
    assert rows[1].auto_to_best is None


def test_no_speed_is_told_in_a_cell_where_one_output_differs() -> None:
    given, text = {AUTO: pairs(2.0), THREE: pairs(1.0, tokens=(1, 3))}, "request 0, token 1: stock 2, ours 3"
    for judged in (Judged(ties=[text]), Judged(differences=[text])):
        rows = cell_rows(SweepCell(batch=1, accuracy=0.5), given, {THREE: judged})
        assert [row.identical for row in rows] == [True, False]
        assert [row.is_proven for row in rows] == [True, not judged.differences]
        assert all(row.speedup is row.makespan_s is row.auto_to_best is None for row in rows)
        assert list(told(rows))[1:] == [f"fixed, batch 1: {'a proven tie: ' if judged.ties else ''}{text}"]
        assert rows[1].ties == judged.ties and Found(rows=rows).is_passed == bool(judged.ties)


def test_one_difference_that_is_no_tie_fails_whatever_else_was_proven() -> None:
    given = {AUTO: pairs(2.0, tokens=(1, 3)), THREE: pairs(1.0)}
    rows = cell_rows(SweepCell(batch=1, accuracy=0.5), given, {AUTO: Judged(["a tie"], ["far apart"])})
    assert (rows[0].ties, rows[0].difference, rows[0].is_proven) == (["a tie"], "far apart", False)
    assert not Found(rows=rows).is_passed and "auto, batch 1: far apart" in told(rows)


def test_the_worst_cell_of_each_criterion_is_named() -> None:
    rows = cell_rows(SweepCell(batch=1, accuracy=0.5), {AUTO: pairs(2.0), THREE: pairs(1.0)})
    rows += cell_rows(SweepCell(batch=4, accuracy=0.0), {AUTO: pairs(8.0), THREE: pairs(16.0)})
    to_stock, to_best = [one for one in Sweep().told(Found(rows=rows)) if isinstance(one, str)]
    assert to_stock.startswith("auto / stock: worst 0.500 (batch 4, accuracy 0) of 2")
    assert to_best.startswith("auto / best fixed: worst 0.500 (batch 1, accuracy 0.5) of 2")


def test_longer_drafts_are_given_up_only_after_a_clear_loss() -> None:
    assert not is_hopeless([1.0])
    assert not is_hopeless([1.0, 0.9])
    assert is_hopeless([0.5, 1.0, 0.8])


def test_larger_batches_generate_fewer_tokens_unless_told() -> None:
    assert Sweep().tokens_of(1) > Sweep().tokens_of(16) > Sweep().tokens_of(64)
    assert Sweep(tokens=9).tokens_of(64) == 9
