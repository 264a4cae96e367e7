"""A policy that takes up a habit: other weights of the same shape."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file
from vllm_specrollout.bench.policy import CHECKPOINT, tasks
from vllm_specrollout.bench.policy.habit import take_up_habit


def test_a_habit_changes_the_weights_and_leaves_the_tasks_as_they_were(tmp_path):
    usual = dict(tasks.STYLES)
    folder = take_up_habit(tmp_path / "policy", steps=1)
    assert usual == tasks.STYLES
    old, new = (load_file(one / "model.safetensors") for one in (CHECKPOINT, folder))
    assert {name: one.shape for name, one in old.items()} == {name: one.shape for name, one in new.items()}
    assert all((old[name].float() != one).any() for name, one in new.items())
    assert (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()
