"""Profiles: found again by the engine they are of, by no other; a damaged one is ignored, after one warning."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.drafters import nothing_accepted
from tests.reference.trees import check, is_chain, num_paths
from vllm_specrollout.budgets import profile
from vllm_specrollout.budgets.profile import Draft, Profile, ProfileKey, ProfileSweep, RandomDrafter, drafts
from vllm_specrollout.cli.commands import app
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import DraftMode, RequestBatch, RequestView, StepRecord, StepTiming, empty_trees

KEY = ProfileKey(
    model="abc", dtype="bfloat16", device="a CPU, 2 cores, 2 threads", vllm="0.32.0", tensor_parallel=1, is_eager=True
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _step(batch: int = 2, nodes: int = 6, ms: float = 3.25, branches: int = 0) -> StepTiming:
    return StepTiming(batch, batch + nodes, nodes, branches, batch, ms, True, batch if nodes else 0, 100, 0)


def _line(seed: int = 0) -> list[StepTiming]:
    rng = np.random.default_rng(seed)
    kinds = [(batch, batch * nodes) for batch in (1, 2, 4, 8, 16, 32) for nodes in (0, 1, 4, 16)] * 8
    return [_step(b, n, (10.0 + 0.2 * (b + n)) * float(rng.normal(1.0, 0.01))) for b, n in kinds]


def test_what_was_kept_is_found_again_in_the_place_of_what_was_before() -> None:
    for name in ("old", "new"):
        kept = Profile(KEY, name, (_step(), _step(4, 0, 1.5)))
        path = profile.save(kept)
        assert profile.load(KEY) == kept
        assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ProfileKey)])
def test_an_engine_that_differs_in_one_thing_finds_nothing(field: str) -> None:
    profile.save(Profile(KEY, "models/tiny", (_step(),)))
    value = {"tensor_parallel": 2, "is_eager": False}.get(field, "other")
    assert profile.load(dataclasses.replace(KEY, **{field: value})) is None


def test_checkpoints_of_one_model_share_a_profile_and_other_shapes_do_not() -> None:
    config = {"hidden_size": 64, "_name_or_path": "step-1", "transformers_version": "4", "rope": {"theta": 1.0}}
    same = {**config, "_name_or_path": "step-2", "transformers_version": "5"}
    assert profile.shape_hash(config) == profile.shape_hash(same) != profile.shape_hash({**same, "hidden_size": 128})
    assert profile.shape_hash({"a": object()}) == profile.shape_hash({"a": object()})


def _damage(text: str, **changes: object) -> str:
    return json.dumps({**json.loads(text), **changes})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: "{}",
        lambda text: _damage(text, format=2),
        lambda text: _damage(text, key={}),
        lambda text: _damage(text, rows=[]),
        lambda text: _damage(text, rows=[[1, 2]]),
        lambda text: _damage(text, rows=3),
        lambda text: _damage(text, columns=["batch"]),
        lambda text: text.replace("3.25", "NaN"),
        lambda text: text.replace("3.25", "-1.0"),
        lambda text: text.replace("100", '"many"'),
        lambda text: text.replace("true", "1"),
        lambda text: text + "\udcff",
    ],
)
def test_a_damaged_profile_is_ignored_after_one_warning(damage, caplog: pytest.LogCaptureFixture) -> None:
    path = profile.save(Profile(KEY, "models/tiny", (_step(),)))
    path.write_text(damage(path.read_text()), errors="surrogateescape")
    with caplog.at_level(logging.WARNING, logger="vllm.specrollout"):
        assert profile.load(KEY) is None
    (record,) = caplog.records
    assert "run `specrollout profile` again" in record.getMessage()


@pytest.mark.parametrize("draft", drafts())
def test_drafts_have_the_size_and_the_paths_asked_for(draft: Draft) -> None:
    tree = profile.random_tree(draft, 50, np.random.default_rng(0))
    check(tree)
    assert tree.size == draft.nodes
    assert not tree.size or num_paths(tree.parents) == draft.width


def test_the_sweep_goes_through_all_kinds_and_asks_for_what_it_drafts() -> None:
    sweep = ProfileSweep(drafts())
    drafter = RandomDrafter(50, sweep)
    view = RequestView("r", np.zeros(4, np.int32), 2, 1000)
    batch = RequestBatch.of([view, dataclasses.replace(view, request_id="line", shape=DraftMode.CHAIN)])
    seen = []
    for _ in range(2 * len(drafts())):
        limits = sweep.limits(batch)
        plan = sweep.choose([drafter.propose(batch, limits)], limits, batch, 0.0)
        tree, line = plan.trees.tree(0), plan.trees.tree(1)
        seen.append((tree.size, num_paths(tree.parents) if tree.size else 1))
        assert line.size == tree.size and plan.pays and is_chain(line)
    assert seen == 2 * [(draft.nodes, draft.width) for draft in drafts()]


def test_only_decode_steps_of_the_timed_rounds_count() -> None:
    sweep = ProfileSweep(drafts())
    record = StepRecord(None, empty_trees([]), nothing_accepted(0))
    sweep.observe(dataclasses.replace(record, timing=_step()))
    sweep.is_recording = True
    sweep.observe(dataclasses.replace(record, timing=dataclasses.replace(_step(), is_decode_only=False)))
    sweep.observe(record)
    sweep.observe(dataclasses.replace(record, timing=_step(ms=7.0)))
    assert [timing.step_ms for timing in sweep.timings] == [7.0]


def test_a_disturbed_step_is_left_out() -> None:
    timings = [_step(ms=10.0), _step(ms=11.0), _step(ms=80.0), _step(8, 0, 80.0)]
    assert profile.undisturbed(timings) == [timings[0], timings[1], timings[3]]


def test_the_summary_gives_the_line_and_the_knee_of_what_was_measured() -> None:
    found = profile.summary(_line())
    assert [row["rows"] for row in found["by_rows"]] == sorted(row["rows"] for row in found["by_rows"])
    for row in found["by_rows"]:
        assert row["ms"] == pytest.approx(10.0 + 0.2 * row["rows"], rel=0.03)
        assert row["fitted_ms"] == pytest.approx(row["ms"], rel=0.1)
    assert found["error"] < 0.05
    # where a step takes a tenth more than that of one row
    assert found["c_peak"] == pytest.approx(6.1, rel=0.3) and not found["is_corner"]
    json.dumps(found)


def test_shuffling_keeps_every_step_and_is_the_same_each_time() -> None:
    timings = _line()
    found = profile.shuffled(timings)
    assert found == profile.shuffled(timings) != timings
    assert sorted(t.step_ms for t in found) == sorted(t.step_ms for t in timings)


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (["--batches", "0,1"], "`--batches` holds 0, outside 1 to 1024"),
        (["--steps", "0"], "`--steps` is 0, outside 1 to 200"),
    ],
)
def test_flags_that_make_no_sense_are_refused_before_an_engine_starts(flags: list[str], cause: str) -> None:
    result = CliRunner().invoke(app, ["profile", "some/model", *flags])
    assert isinstance(result.exception, ConfigError)
    assert cause in result.exception.cause
