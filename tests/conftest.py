"""Shared by all tests: readable snapshots of the messages a user can meet, folders that need their own process."""

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from tests import own_processes
from vllm_specrollout import envs

# what of ours fails ends the test, in this process and in those it starts, rather than being switched off
os.environ[envs.STRICT] = "1"

# how long an example takes says something of the host, and nothing of the code
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Collected only when nothing else is asked for (`pytest tests/v2`); tests/e2e/test_own_processes.py has them run.
OWN_PROCESS = [Path(__file__).parent / folder for folder in own_processes.FOLDERS]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    for folder in OWN_PROCESS:
        if collection_path.is_relative_to(folder) and not all(path.is_relative_to(folder) for path in asked):
            return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that wait for other processes wait last."""
    items.sort(key=lambda item: item.path.name == own_processes.STARTED_BY)


def pytest_collection_finish(session: pytest.Session) -> None:
    is_asked = any(item.path.name == own_processes.STARTED_BY for item in session.items)
    if is_asked and not session.config.option.collectonly:
        session.config.own_processes = own_processes.Beside()


def pytest_unconfigure(config: pytest.Config) -> None:
    beside = getattr(config, "own_processes", None)
    if beside is not None:
        beside.stop()


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
