"""Environment variables, where a user's own are missing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from vllm_specrollout.config import envs


def test_a_user_without_a_home_has_a_cache_folder_among_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(envs.CACHE_HOME, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert envs.cache_dir() == Path(tempfile.gettempdir()) / "vllm-specrollout"
