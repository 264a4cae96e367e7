import msgspec
import numpy as np
import pytest
from vllm_specrollout.bench.studies import rhymerl
from vllm_specrollout.bench.studies.rhymerl import (
    ARMS,
    TABLE_2,
    RhymeRLInputs,
    Training,
    epochs,
    histospec,
    ranked,
    run,
)

INPUTS = RhymeRLInputs()
SMALL = msgspec.structs.replace(INPUTS, problems=512, prompts=64, workers=8, ranks=4, samples=8, steps=8)


def test_answers_that_are_all_alike_are_ranked_right_and_none_migrates():
    assert ranked(SMALL, 0.0, 8, 0) == pytest.approx((100.0, 0.0, 0.0, 0.0))


@pytest.mark.parametrize(("dataset", "spread"), list(zip(("first", "second", "third"), INPUTS.own_spread, strict=True)))
def test_spreads_fitted_to_8_ranks_predict_the_accuracy_with_16(dataset, spread):
    eight, sixteen = (ranked(INPUTS, spread, count, 0) for count in (8, 16))
    assert sum(eight) == pytest.approx(100.0) and min(eight) >= 0.0
    assert eight[0] == pytest.approx(TABLE_2[dataset, 8][0], rel=0.01)
    assert sixteen[0] == pytest.approx(TABLE_2[dataset, 16][0], rel=0.15)


def test_windows_grow_by_two_along_a_run_and_begin_anew_behind_a_miss():
    # runs of 5 whatever is drawn: 2 drafts right and one token, then 2 of 4 right and the target's own
    always_five = msgspec.structs.replace(INPUTS, run_length=4.6, run_spread=0.0)
    tokens, drafts, share = histospec(always_five, 0)
    assert (tokens, drafts, share) == pytest.approx((3.0, 3.0, 4 / 6))


def test_epochs_have_the_same_problems_and_answers_of_their_own():
    before, now = epochs(INPUTS, 0.2, np.random.default_rng(0), 400)
    assert np.corrcoef(np.log(before.mean(axis=1)), np.log(now.mean(axis=1)))[0, 1] > 0.95
    assert (before != now).mean() > 0.9 and now.max() <= INPUTS.longest


def test_each_step_waits_for_what_it_learns_from():
    slow = Training(SMALL, ARMS["HistoPipe"], 1e6, 0).run()
    assert slow == pytest.approx(1e6, rel=0.01), "two steps are in flight, and one is learned from at a time"


def test_histopipe_and_its_tiers_shorten_steps_and_the_products_functions_do_it(monkeypatch):
    seconds = {name: Training(SMALL, ARMS[name], 0.0, 0).run() for name in ("one step off", "two tiers")}
    assert seconds["two tiers"] < 0.9 * seconds["one step off"]

    def all_to_one(groups, engines, step, workers=None):
        return {problem: engines[0] for group in groups for problem in group}

    monkeypatch.setattr(rhymerl.histopipe, "pipeline", all_to_one)
    assert Training(SMALL, ARMS["two tiers"], 0.0, 0).run() > 2.0 * seconds["two tiers"]


def test_migrated_answers_are_generated_to_their_ends(monkeypatch):
    training, generated = Training(SMALL, ARMS["HistoPipe"], 0.0, 0), []
    seconds = training._seconds

    def counted(lengths, late):
        generated.append(sum(lengths) + sum(tokens for tokens, _ in late))
        return seconds(lengths, late)

    monkeypatch.setattr(training, "_seconds", counted)
    monkeypatch.setattr(rhymerl, "epochs", lambda *_: fixed)
    fixed = epochs(SMALL, 0.3, np.random.default_rng(1), 64)
    training.run()
    left = sum(tokens for late in training._deferred.values() for tokens, _ in late)
    assert training.migrated > 0
    # one that moves within a step is counted where it was and where it ends
    assert sum(generated) + left >= SMALL.steps * fixed[1].sum() - 1e-6


def test_the_report_marks_what_was_fitted_and_has_every_printed_figure():
    report = run(SMALL, 0)
    ranks, arms = report.tables
    assert len(ranks.rows) == 6 and sum(str(cell).endswith("*") for row in ranks.rows for cell in row) == 3
    assert [row[0] for row in arms.rows] == [*ARMS, "both of HistoPipe", "all three"]
    assert [row[3] for row in arms.rows[1:]] == ["1.43x", "1.10x", "1.50x", "1.57x", "2.36x"]
