"""Shared by all tests: readable snapshots of the messages a user can meet."""

from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-snapshots", action="store_true", help="rewrite recorded texts instead of comparing them")


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compare a text with the recorded one; `pytest --update-snapshots` records it anew, to be reviewed in the diff."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--update-snapshots"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return check


@pytest.fixture
def render_refusals() -> Callable[..., str]:
    """Run cases (title -> call) that must each refuse, and write down what the user would read."""

    def render(cases: dict[str, Callable[[], object]], hide: dict[str, str] | None = None) -> str:
        from vllm_specrollout.errors import SpecRolloutError

        parts = []
        for title, case in cases.items():
            try:
                case()
            except SpecRolloutError as error:
                text = str(error)
                for secret, shown in (hide or {}).items():
                    text = text.replace(secret, shown)
                parts.append(f"## {title}\n{type(error).__name__}\nerror: {text}\n")
            else:
                pytest.fail(f"not refused: {title}")
        return "\n".join(parts)

    return render
