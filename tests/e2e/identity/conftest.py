"""Models shared by the suite, and what holds for its totals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the suite's models are made, once each."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session", autouse=True)
def _tie_rate() -> Iterator[None]:
    """Over a long run, at most one tie in 50,000 tokens is let pass where rows are alike."""
    yield
    try:
        from tests.e2e.identity.check import ALIKE
    except ImportError:
        return  # no vLLM here, nothing was compared
    if ALIKE.tokens >= 50_000:
        assert len(ALIKE.ties) <= ALIKE.tokens / 50_000
