"""Epochs of one run in a folder say nothing to another, and what a run is called stays."""

from __future__ import annotations

import pytest

from tests.unit.history.archived import answer
from tests.unit.history.stored import names
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.history.answers import RewardOutcome
from vllm_specrollout.history.database import Database, Reward
from vllm_specrollout.history.store import HistoryStore


def test_another_run_in_the_folder_neither_drafts_nor_moves_our_epoch_nor_goes(tmp_path):
    old = HistoryStore(HistoryConfig(dir=str(tmp_path), run="old"))
    old.begin_epoch(300)
    old.append(answer("x", epoch=300))
    old.close()
    new = HistoryStore(HistoryConfig(dir=str(tmp_path), run="new"))
    new.append(answer("y"))
    for epoch in (1, 2):
        assert (new.begin_epoch(), names(new)) == (epoch, ["y"])
    again = HistoryStore(HistoryConfig(dir=str(tmp_path), run="old"))
    assert (again.epoch, names(again)) == (300, ["x"])


@pytest.mark.parametrize("node", [None, "", "garbage", b"\xff" * 100])
def test_a_folder_without_its_names_goes_on_with_the_run_of_its_files(tmp_path, node):
    first = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    first.append(answer("x"))
    first.close()
    (tmp_path / "node").unlink()
    if node is not None:
        (tmp_path / "node").write_bytes(node if isinstance(node, bytes) else node.encode())
    assert names(HistoryStore(HistoryConfig(dir=str(tmp_path)))) == ["x"]


@pytest.mark.parametrize("run", ["../x", "a b", "x\n", ".", "x" * 65])
def test_a_run_that_could_name_no_file_is_refused(run):
    with pytest.raises(ConfigError, match="`history.run` is"):
        HistoryConfig(run=run)


def test_an_id_of_any_length_is_kept_as_a_digest_and_gets_its_reward(tmp_path):
    store, ids = HistoryStore(HistoryConfig(dir=str(tmp_path))), ["a" * (1 << 20), "b" * (1 << 20), "c" * 256]
    for one in ids:
        store.arrived("p", one)
        assert store.report_reward(one, 0.5) is RewardOutcome.EARLY
        store.append(answer(one))
        assert store.report_reward(one, 1.0) is RewardOutcome.REPEATED
    kept = [row.request.decode() for row in store._folder.own.rows()]
    assert len(set(kept)) == 3 and max(map(len, kept)) <= 256 and kept[2] == ids[2]
    assert set(store._requests) == set(kept) and store.stats().memory_bytes < 4096
    assert [row.reward for row in store._folder.own.rows()] == [1.0] * 3
    store.close()


def test_of_rewards_only_those_that_came_since_are_read(tmp_path):
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    for number in range(4):
        store.append(answer(f"{number}", reward=0.0))
    reader = Database(store._folder.own.path)
    assert reader.rewards(0, 10) == [], "what was written with its answer is in its row"
    store.report_reward("1", 1.0)
    ((stamp, reward),) = reader.rewards(0, 10)
    assert (reward.reward, reward.request) == Reward(1.0, 0, b"1")[::2]
    store.report_reward("3", 2.0)
    store.report_reward("1", 3.0)
    assert [one.reward for _, one in reader.rewards(stamp, 10)] == [2.0, 3.0]
    assert [one.reward for _, one in reader.rewards(0, 1)] == [2.0]
    store.close()
