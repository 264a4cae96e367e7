import msgspec
import pytest
from vllm_specrollout.bench.studies.what_if import ARMS, WhatIfInputs, dealt, drawn, run, run_arm

SMALL = msgspec.structs.replace(WhatIfInputs(), engines=(2, 4), failing=(4,), per_host=2, hosts_per_rack=1, requests=16)


def test_every_arm_and_every_failure_has_a_row():
    report = run(SMALL, 0)
    scaled, failing = report.tables
    assert [row[:3] for row in scaled.rows[:2]] == [("2", "-", "plain"), ("2", "history", "drafts")]
    assert len(scaled.rows) == 2 * (2 * len(ARMS) - 1) and len(failing.rows) == 8
    assert all(int(row[-1]) > 0 for row in failing.rows if row[3] == "10%"), "what ran there is run again"


def test_drafts_pay_and_ladders_lose_nothing():
    seconds = {arm: run_arm(SMALL, 4, "history", arm, 1).makespan_ms for arm in ARMS}
    assert seconds["drafts"] < 0.8 * seconds["plain"]
    assert max(seconds["move"], seconds["attach"]) < 1.1 * seconds["by forecast"]


def test_forecasts_are_of_another_epoch_and_place_siblings_together():
    work, forecasts = drawn(SMALL, 4, "history", 0)
    means = work.length.reshape(-1, 16).mean(axis=1)
    assert len(forecasts) == len(means) and all(0.4 < forecasts[f"p{i}"] / mean < 2.5 for i, mean in enumerate(means))
    assert set(forecasts.values()).isdisjoint(means.tolist())
    homes = dealt(SMALL, 4, forecasts)
    assert len(homes) == 64 and all(len({homes[f"r{i}"] for i in range(p * 16, p * 16 + 16)}) == 1 for p in range(4))
    assert list(dealt(SMALL, 2, None).values()) == ["e0"] * 16 + ["e1"] * 16


@pytest.mark.parametrize("drafter", ["history", "head"])
def test_the_same_seed_gives_the_same_batch(drafter):
    runs = [run_arm(SMALL, 4, drafter, "attach", seed).makespan_ms for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
