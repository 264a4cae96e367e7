"""Where vLLM is not installed, the tests alone that drive none of it are collected; and the smallest model for all."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

WITHOUT_VLLM = (
    *("by_hand", "checkpoint", "ending", "first_hour", "history_crash", "policy_inflate", "policy_random_model"),
    *("policy_tokenizer", "report_page", "trainer_process", "waiting_rows", "wheel"),
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    runs_here = collection_path.stem.removeprefix("test_") in WITHOUT_VLLM or collection_path.suffix != ".py"
    return None if runs_here or importlib.util.find_spec("vllm") else True


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_specrollout.bench.policy.random_model import make_random_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_random_model(folder, size="1M", hidden=64, num_layers=2, dtype="float32")
