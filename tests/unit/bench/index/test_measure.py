"""What `specrollout bench index` counts, and what it is filled with. No time is measured here."""

from __future__ import annotations

import numpy as np
import pytest
from vllm_specrollout.bench.index import measure
from vllm_specrollout.bench.index.data import Data, recorded, synthetic
from vllm_specrollout.bench.index.systems import Ours

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.errors import ConfigError, UnsupportedError


def test_the_recorded_answers_come_from_the_same_problems_in_every_epoch() -> None:
    data = recorded()
    assert len(data.problems) == 64
    for problem in data.problems:
        assert [len(epoch.answers) for epoch in problem.epochs] == [16, 16, 16]
        assert all(len(epoch.rewards) == 16 for epoch in problem.epochs)


def test_a_file_without_recorded_answers_is_refused(tmp_path) -> None:
    path = tmp_path / "no.json.gz"
    path.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="no recorded answers"):
        recorded(path)


def test_synthetic_answers_have_the_length_asked_for_and_share_60_to_90_percent() -> None:
    data = synthetic(2, 4, 600, 1, seed=1)
    answers = [a for problem in data.problems for epoch in problem.epochs for a in epoch.answers]
    assert len(answers) == 16 and {len(a) for a in answers} == {600}
    assert data.new_share is not None and 0.1 < data.new_share < 0.42
    again = synthetic(2, 4, 600, 1, seed=1)
    assert np.array_equal(again.problems[1].present.answers[3], data.problems[1].present.answers[3])


def test_a_draft_is_accepted_along_one_path() -> None:
    tokens, parents = [5, 6, 7, 8], [-1, 0, -1, 2]
    assert measure.accepted(tokens, parents, [7, 8, 9]) == 2
    assert measure.accepted(tokens, parents, [5, 8]) == 1
    assert measure.accepted(tokens, parents, [6]) == 0
    assert measure.accepted([], [], [6]) == 0


def test_a_replay_writes_every_answer_to_its_end() -> None:
    data = synthetic(2, 3, 120, 1, seed=2)
    system = Ours(data, HistoryConfig(min_match=1))
    system.build()
    result = measure.replay(system, data, nodes=8, is_chain=False, batch=4, begin=0)
    assert result.tokens == 2 * 3 * 120
    assert len(result.seconds) == result.steps < result.tokens


@pytest.mark.parametrize("is_chain", [True, False])
def test_what_a_device_looks_up_is_accepted_as_often_as_what_the_index_drafts(is_chain: bool) -> None:
    held = recorded()
    data = Data(held.name, held.problems[:2])
    (found,) = measure.on_the_device(data, HistoryConfig(), (8,), is_chain, 32, lambda text, units: None)
    assert found.ours > 3.0 and found.is_met, found


def test_a_row_is_met_below_its_limit_and_for_tokens_above() -> None:
    assert measure.row("d", "n", "us", 1.0, 4.0, 0.25).is_met
    assert not measure.row("d", "n", "us", 1.1, 4.0, 0.25).is_met
    assert measure.row("d", "n", "tokens", 1.2, 1.0, 1.15, is_least=True).is_met
    assert measure.row("d", "n", "B", 2.5, None, 3.0).is_met
    assert measure.row("d", "n", "B", 2.5, None, None).is_met is None


def test_without_the_other_system_the_error_says_how_to_get_it(monkeypatch) -> None:
    from vllm_specrollout.bench.index import systems

    monkeypatch.setitem(__import__("sys").modules, "arctic_inference.suffix_decoding", None)
    monkeypatch.setitem(__import__("sys").modules, "arctic_inference", None)
    with pytest.raises(UnsupportedError, match="arctic-inference 0.3.0") as error:
        systems.load_arctic()
    assert "pip install arctic-inference==0.3.0" in error.value.hint
