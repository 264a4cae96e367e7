"""A policy that moved: other weights of the same shape."""

import itertools
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file
from vllm_specrollout.bench.policy import CHECKPOINT, drift, tasks


def test_a_habit_changes_the_weights_and_leaves_the_tasks_as_they_were(tmp_path):
    usual = dict(tasks.STYLES)
    folder = drift.take_up_habit(tmp_path / "policy", steps=1)
    assert usual == tasks.STYLES
    assert min(_moved(folder)) > 0.0


def test_an_update_by_reinforcement_learning_moves_the_policy_a_little(tmp_path, monkeypatch):
    earned = itertools.cycle((0.0, 1.0))
    monkeypatch.setattr(drift, "reward", lambda problem, text: next(earned))
    folder = drift.move_slowly(tmp_path / "policy", updates=1, num_problems=3)
    # the first step of AdamW is the rate
    assert 0.0 < max(_moved(folder)) <= 1.01e-4


def _moved(folder: Path) -> list[float]:
    """By how much a weight of each tensor moved at most."""
    old, new = (load_file(one / "model.safetensors") for one in (CHECKPOINT, folder))
    assert {name: one.shape for name, one in old.items()} == {name: one.shape for name, one in new.items()}
    assert (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()
    return [(old[name].float() - one).abs().max().item() for name, one in new.items()]
