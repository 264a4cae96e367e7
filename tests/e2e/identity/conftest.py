"""Models shared by the suite, and the totals at its end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the suite's models are made, once each."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session", autouse=True)
def _tie_rate() -> Iterator[None]:
    """Over a long run, at most one tie in 50,000 tokens is let pass."""
    yield
    try:
        from tests.e2e.identity.check import TOTAL
    except ImportError:
        return  # no vLLM here, nothing was compared
    if TOTAL.tokens >= 50_000:
        assert len(TOTAL.ties) <= TOTAL.tokens / 50_000


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The totals, where no capturing can swallow them."""
    check = sys.modules.get("tests.e2e.identity.check")
    if check is None:
        return
    terminalreporter.write_line(f"identity against stock vLLM: {check.TOTAL}")
    for tie in check.TOTAL.ties:
        terminalreporter.write_line(f"proven tie: {tie}")
