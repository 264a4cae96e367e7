"""`specrollout try`: what it refuses, what the first line says, and what it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.runner.rows import Judged, Pair, proven_row
from bench.scenarios.trial import ANSWERS, STEPS, Trial, keep, scatter, verdict
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.replay.dump import read_dump


@pytest.fixture
def pair(make_run):
    """Stock takes eight seconds, ours four."""
    ours = make_run([[1, 2, 4]], [1.0, 4.0], steps=2, request_steps=2, drafted=2, accepted=1)
    return Pair(stock=make_run([[1, 2, 3]], [1.0, 8.0]), ours=ours)


def test_a_model_and_a_file_have_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model is named"):
        Trial().check()
    with pytest.raises(ConfigError, match="`--prompts` names no file"):
        Trial(model="any").check()
    with pytest.raises(ConfigError, match="drafter"):
        Trial(model="any", prompts=tmp_path / "any", spec_rollout={"drafter": ["ngram"]}).check()


def test_engines_that_take_turns_on_a_gpu_share_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.scenarios.trial._is_on_cpu", lambda: False)
    with pytest.raises(ConfigError, match="two engines share the GPUs in 3 rounds"):
        Trial(model="any", prompts=tmp_path / "any", rounds=3).check()
    Trial(model="any", prompts=tmp_path / "any", rounds=3, gpu_memory=0.45).check()


def test_no_speed_is_told_of_other_tokens(pair: Pair) -> None:
    row = proven_row("epoch 1", 1, 0, [pair], Judged(differences=["request 0, token 2"]))
    assert row.speedup is None and row.identical is False and not row.is_proven
    assert verdict([row], "").startswith("NOT the tokens of stock vLLM")
    assert "does not repeat itself" in verdict([row], "request 0, token 2")


def test_behind_proven_ties_a_speed_is_told_and_so_are_they(pair: Pair) -> None:
    row = proven_row("epoch 1", 1, 0, [pair], Judged(ties=["request 0, token 2"]))
    assert row.speedup == 2.0 and row.identical is False and row.is_proven
    assert verdict([row], "") == "stock vLLM's tokens, but for 1 proven ties: 2.00x as fast in epoch 1"


def test_equal_tokens_are_told_with_their_speed(pair: Pair, make_run) -> None:
    same = Pair(stock=pair.ours, ours=make_run([[1, 2, 4]], [1.0, 2.0], steps=2, request_steps=2))
    row = proven_row("epoch 2", 1, 0, [same], Judged())
    assert row.identical
    assert verdict([row], "") == "the very tokens of stock vLLM: 2.00x as fast in epoch 2"


def test_rounds_are_told_with_their_quartiles(make_run) -> None:
    ours = make_run([[1, 2, 3]], [1.0, 4.0], steps=2, request_steps=2)
    pairs = [Pair(stock=make_run([[1, 2, 3]], [1.0, wall]), ours=ours) for wall in (6.0, 8.0, 10.0)]
    row = proven_row("epoch 1", 1, 0, pairs, Judged())
    assert verdict([row], "") == "the very tokens of stock vLLM: 2.00x (1.75 to 2.25) as fast in epoch 1"


def test_stock_is_compared_with_itself_from_round_to_round(make_run) -> None:
    first = [make_run([[1]], [wall]) for wall in (4.0, 5.0, 4.0)]
    assert scatter([first[:2]]) == 1.25
    # twice 1.25, and twice 1.0
    assert scatter([first, [make_run([[2]], [7.0])] * 3]) == pytest.approx(1.25)
    assert scatter([[make_run([[2]], [7.0])] * 3]) == 1.0


def test_what_is_kept_is_what_a_forecast_reads(tmp_path: Path, make_run) -> None:
    record = tmp_path / "record"
    record.write_bytes(b"steps")
    epochs = [make_run([[1, 2], [3]], [1.0]), make_run([[4], [5, 6]], [1.0])]
    keep(tmp_path / "kept", record, [[7], [8]], [0, 1], epochs)
    first, second = read_dump(tmp_path / "kept" / ANSWERS)
    assert [one.answer.tolist() for one in first.answers] == [[1, 2], [3]]
    assert [(one.problem_id, one.prompt.tolist()) for one in second.answers] == [("0", [7]), ("1", [8])]
    assert (first.epoch, second.epoch) == (1, 2)
    assert (tmp_path / "kept" / STEPS).read_bytes() == b"steps"
