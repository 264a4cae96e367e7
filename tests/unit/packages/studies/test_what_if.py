from statistics import fmean

import msgspec
import pytest
from vllm_specrollout.bench.studies import what_if
from vllm_specrollout.bench.studies.what_if import ARMS, STEPS, TRY, TryInputs, dealt, drawn, repeat_try, run, run_arm

SMALL = msgspec.structs.replace(
    what_if.WhatIfInputs(), engines=(2, 4), rollouts=2, failing=(4,), per_host=2, hosts_per_rack=1, requests=16
)


@pytest.fixture(scope="module")
def repeated():
    return [repeat_try(TryInputs(), seed) for seed in range(20)]


@pytest.mark.parametrize("name", TRY)
def test_the_run_on_a_gpu_comes_out_within_15_percent(name, repeated):
    printed, others = (fmean(one[name] for one in runs) for runs in (repeated[:5], repeated[5:]))
    assert printed == pytest.approx(TRY[name], rel=0.15)
    assert others == pytest.approx(TRY[name], rel=0.15)


def test_every_arm_and_every_failure_has_a_row_with_its_range():
    report = run(SMALL, 0)
    repeated, scaled, failing = report.tables
    assert [row[0] for row in repeated.rows] == list(TRY)
    assert [row[:3] for row in scaled.rows[:2]] == [("measured", "2", "plain"), ("measured", "2", "drafts")]
    assert len(scaled.rows) == 2 * len(STEPS) * len(ARMS) and len(failing.rows) == 8
    assert all(" to " in cell for row in scaled.rows for cell in row[3:])
    assert all(int(row[-1].split()[0]) > 0 for row in failing.rows if row[3] == "10%"), "what ran there is run again"


def test_a_range_holds_the_batches_of_seeds_that_follow_each_other():
    seconds = [run_arm(SMALL, "measured", 2, "move", seed).makespan_ms / 1e3 for seed in (3, 4)]
    (row,) = [row for row in run(SMALL, 3).tables[1].rows if row[:3] == ("measured", "2", "move")]
    assert row[3] == f"{fmean(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


@pytest.mark.parametrize("steps", STEPS)
def test_drafts_pay_and_ladders_lose_little(steps):
    seconds = {arm: run_arm(SMALL, steps, 4, arm, 1).makespan_ms for arm in ARMS}
    assert seconds["drafts"] < 0.9 * seconds["plain"]
    assert max(seconds["move"], seconds["attach"]) < 1.1 * seconds["by forecast"]


def test_a_move_costs_its_prefill_and_the_step_that_holds_it():
    free, dear = (msgspec.structs.replace(SMALL, prefill_ms=ms, beat_s=0.1) for ms in (0.0, 100.0))
    moved = [run_arm(given, "reckoned", 4, "move", 1).counts["move"] for given in (free, dear)]
    assert moved[0] > 0 == moved[1]


def test_forecasts_are_of_another_epoch_and_place_siblings_together():
    work, forecasts = drawn(SMALL, 4, 0)
    means = work.length.reshape(-1, 16).mean(axis=1)
    assert len(forecasts) == len(means) and all(0.4 < forecasts[f"p{i}"] / mean < 2.5 for i, mean in enumerate(means))
    assert set(forecasts.values()).isdisjoint(means.tolist())
    homes = dealt(SMALL, 4, forecasts)
    assert len(homes) == 64 and all(len({homes[f"r{i}"] for i in range(p * 16, p * 16 + 16)}) == 1 for p in range(4))
    assert list(dealt(SMALL, 2, None).values()) == ["e0"] * 16 + ["e1"] * 16


def test_the_same_seed_gives_the_same_batch():
    runs = [run_arm(SMALL, "measured", 4, "attach", seed).makespan_ms for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
