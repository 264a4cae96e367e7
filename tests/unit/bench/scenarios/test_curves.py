"""Curves with engines that answer at once: what is replayed, and when no time is told."""

import functools

import numpy as np
import pytest

from bench.scenarios import curves
from bench.scenarios.curves import Curves, bench_curves
from tests.unit.bench.runner.fake_engines import FakeProcess
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.history.store import HistoryStore


class Replaying(FakeProcess):
    """Answers with the tokens that it is given."""

    follows = True

    def _trainer(self, function, epoch):
        assert (function, epoch) == ("begin_epoch", 2)

    def _generate(self, prompts, params, stats, arrives_after):
        reply = super()._generate(prompts, params, stats, arrives_after)
        if self.follows:
            ends = [one["trace_decode_token_ids"][:-1] for one in params]
            reply["token_ids"] = [[*given, ids[-1]] for given, ids in zip(ends, reply["token_ids"], strict=True)]
            for own, one in zip(reply["token_ids"], params, strict=True):
                own[-1] = one["trace_decode_token_ids"][-1] + (own[-1] // 10)
        return reply


@pytest.fixture
def curved(measured, monkeypatch):
    monkeypatch.setattr(curves, "describe", lambda: {"gpu": "one"})
    sizes = ("--model", "tiny", "--batch", "1,40", "--tokens", 8, "--rounds", 2)
    return functools.partial(measured, bench_curves, *sizes, kind=Replaying)


def test_each_batch_has_a_row_of_stock_itself_and_one_of_ours_with_both_step_times(curved):
    status, report, printed = curved()
    rows = report["rows"]
    assert status == 0 and [(row["batch"], row["name"]) for row in rows] == [
        *((1, "stock again"), (1, "ours"), (40, "stock again"), (40, "ours"))
    ]
    assert [row["num_requests"] for row in rows] == [32, 32, 80, 80]
    assert all(row["identical"] and row["step_ms"] and row["stock_ms"] for row in rows)
    assert [row["speedup"] for row in rows] == pytest.approx([1.0, 2.0] * 2) and "2.00x" in printed


def test_an_interpreter_tells_tokens_a_step_and_no_time(curved):
    status, report, printed = curved("--interpreted")
    rows = report["rows"]
    assert (status, [row["name"] for row in rows]) == (0, ["ours", "ours"])
    assert all(row["tokens_per_step"] and row["speedup"] is row["step_ms"] is row["rounds_s"] is None for row in rows)
    assert "no time is told" in printed


def test_one_other_token_costs_the_speed(curved):
    status, report, printed = curved(is_ours_wrong=True)
    assert status == 1 and "token 7" in printed
    assert [row["speedup"] for row in report["rows"] if row["name"] == "ours"] == [None, None]


def test_stock_that_does_not_follow_the_answers_is_an_error(curved):
    with pytest.raises(SpecRolloutError, match="did not follow"):
        curved(follows=False)


def test_without_a_gpu_the_error_names_the_interpreter(monkeypatch):
    monkeypatch.setattr(curves, "describe", lambda: {"gpu": None})
    with pytest.raises(SpecRolloutError) as error:
        Curves().check()
    assert "--interpreted" in error.value.hint


def test_every_run_finds_the_past_of_its_problems_under_names_of_its_own(tmp_path):
    data = curves.recorded(past=2)
    scenario = Curves(model="tiny", batches=(1,), rounds=1)
    scenario._remember(data, tmp_path)
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    assert store.epoch == 2
    for number in (-1, 0):
        found = [store.read(one) for one in store.find(curves._problem(1, number, 1))]
        assert sorted({one.epoch for one in found}) == [0, 1] and len(found) == 32
        told = data.problems[1].past[1]
        assert any(np.array_equal(one.token_ids, told.answers[0]) and one.reward == told.rewards[0] for one in found)
    assert not store.find("1/1/0")
    store.close()
