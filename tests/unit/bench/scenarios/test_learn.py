"""Heads that learn, as a scenario: which engines there are, and when they learn, load new weights and are compared."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from bench.runner.results import TABLES, reduced
from bench.runner.rows import Pair
from bench.scenarios import learn
from bench.scenarios.learn import ENGINES, Learn, bench_learn, digest_of, epoch_rows
from tests.unit.bench.runner.fake_engines import FakeProcess
from vllm_specrollout.config import parse

HEAD = {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 6}


@pytest.mark.parametrize(
    ("arm", "sources", "model", "folder"),
    [
        ("frozen", ("model", "model_alternatives"), "HEAD", ""),
        ("online", ("model", "model_alternatives"), "HEAD", "online"),
        ("nothing", (), "", "nothing"),
        ("history", ("history",), "", ""),
        ("beside", ("history",), "", "nothing"),
    ],
)
def test_engines_differ_in_their_head_their_history_and_whether_they_learn(arm, sources, model, folder, tmp_path):
    own = parse(Learn().spec_rollout(arm, HEAD, tmp_path))
    assert own.sources == sources
    assert (own.speculative_config or {}).get("model", "") == model
    assert (own.train.mode, Path(own.train.dir or "").name) == (("auto" if folder else "off"), folder)
    # drafts of one length, or what is accepted of them could not be compared
    assert (own.budget, own.max_draft_tokens, own.max_depth, own.shape) == ("fixed", 6, 6, "chain")


class Process(FakeProcess):
    """Learns 1,000 rows at a time, and writes down what is asked of it."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.done, self.rows = list[str](), 0
        self.made.append(self)

    def _trainer(self, function: str, **given: Any) -> dict[str, Any] | None:
        self.done.append(function)
        if function != "learn":
            return None
        self.rows += 1000
        return {"trainer_rows": self.rows, "trainer_seconds": 2, "number": self.rows // 1000}

    def _reload(self, folder: str) -> None:
        self.done.append(Path(folder).name)

    def _generate(self, prompts: Any, params: Any, stats: bool, **more: Any) -> dict[str, Any]:
        self.done.append("generate")
        return super()._generate(prompts, params, stats, **more)


@pytest.fixture
def learned(measured, monkeypatch):
    monkeypatch.setattr(learn, "moved_policy", lambda by, cache: Path(by))
    sizes = ("--problems", 3, "--samples", 2, "--epochs", 3, "--batch", 4, "--max-tokens", 12)
    return functools.partial(measured, bench_learn, *sizes, "--engines", ",".join(ENGINES), kind=Process, made=[])


def test_engines_learn_between_epochs_and_get_the_new_weights_behind_that(learned):
    made: list[Process] = []
    assert learned(made=made)[0] == 0
    stock, *ours = made
    assert stock.done == ["generate", *["generate", "habit"] * 2, "generate"]
    for process, arm in zip(ours, ENGINES, strict=True):
        learns = ["learn"] if arm in ("online", "nothing", "beside") else []
        assert process.done == ["generate", *["generate", *learns, "habit", "begin_epoch"] * 2, "generate"]
    assert learned("--drift", "none", made=made)[0] == 0 and made[len(ENGINES) + 1].done[2] == "checkpoint"


def test_each_epoch_is_told_with_what_was_learned_before_it(learned):
    status, report, printed = learned()
    assert status == 0
    rows = {(row["epoch"], row["name"]): row for row in report["rows"]}
    assert list(rows) == [(epoch, arm) for epoch in (1, 2, 3) for arm in ENGINES]
    assert [rows[epoch, "online"]["learned_rows"] for epoch in (1, 2, 3)] == [None, 1000, 2000]
    assert [rows[epoch, "online"]["published"] for epoch in (1, 2, 3)] == [None, 1, 2]
    assert rows[3, "frozen"]["learned_rows"] is None
    assert all(row["identical"] and row["speedup"] == pytest.approx(2.0) for row in rows.values())
    # the same tokens in all engines, other ones in each epoch
    assert len({row["digest"] for row in rows.values()}) == 3
    assert printed.count(rows[3, "frozen"]["digest"]) == len(ENGINES)
    table = TABLES["learn"](reduced(report))
    assert table.count("\n") == 1 + len(rows) and "| 3 | online | yes |" in table


def test_one_wrong_token_costs_every_speed_and_the_exit_status(learned):
    status, report, printed = learned(is_ours_wrong=True)
    assert status == 1 and "2.00x" not in printed and "epoch 1, frozen: request 5, token 11" in printed
    assert all(not row["identical"] and row["speedup"] is row["makespan_s"] is None for row in report["rows"])


def test_what_is_accepted_is_told_per_draft_and_beside_the_first_epoch(make_run):
    tokens = [[1] * 9, [2] * 9]
    stock = make_run(tokens, [1.0, 2.0, 3.0])
    # the first step of each request has no draft
    runs = [make_run(tokens, [1.0, 2.0], request_steps=10, accepted=accepted, steps=5) for accepted in (32, 24, 0)]
    pairs = [Pair(stock=stock, ours=run) for run in runs]
    learned = {("online", 2): {"trainer_rows": 7, "trainer_seconds": 3, "number": 1}}
    rows = epoch_rows({"online": pairs}, learned, 2, 6)
    assert [row.accepted_per_draft for row in rows] == [4.0, 3.0, 0.0]
    assert [row.of_first for row in rows] == [1.0, 0.75, 0.0]
    assert [(row.learned_rows, row.trainer_s, row.published) for row in rows] == [(None,) * 3] * 2 + [(7, 3, 1)]
    (resting,) = epoch_rows({"nothing": pairs[2:]}, {}, 2, 6)
    assert resting.of_first is None and resting.digest == digest_of(stock)
