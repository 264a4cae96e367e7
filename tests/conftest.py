"""Shared by all tests: readable snapshots of the messages a user can meet, and what holds for all their processes."""

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from vllm_specrollout.config import envs

# what of ours fails ends the test, in this process and in those it starts, rather than being switched off
os.environ[envs.STRICT] = "1"

# Tests run side by side, one per core. An engine of a test's size gains nothing from a second thread, and threads that
# share a core wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

# `--hypothesis-profile NAME`; how long an example takes says something of the host, and nothing of the code
hypothesis.settings.register_profile("usual", deadline=None)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("usual")

# Triton decides whether to interpret when a kernel is decorated, so whatever imports a kernel first decides for all.
# These folders interpret, and are collected only when nothing else is asked for: `pytest tests/kernels tests/v2`.
INTERPRETED = [Path(__file__).parent / folder for folder in ("kernels", "v2")]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    is_asked = all(any(path.is_relative_to(folder) for folder in INTERPRETED) for path in asked)
    return True if collection_path in INTERPRETED and not is_asked else None


@pytest.fixture(autouse=True)
def _warnings_reach_caplog(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # vLLM keeps its loggers' messages to itself, wherever an earlier test of this process has imported it, and tests
    # with engines have it say errors alone
    if "caplog" not in request.fixturenames:
        yield
        return
    logger = logging.getLogger("vllm")
    level = logger.level
    monkeypatch.setattr(logger, "propagate", True)
    logger.setLevel(logging.NOTSET)
    yield
    logger.setLevel(level)


# where tests start engines and servers, or drive parts of vLLM's
WITH_ENGINES = [Path(__file__).parent / folder for folder in ("e2e", "faults", "integration", "trainers", "v2")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in WITH_ENGINES):
            item.add_marker("engine")


@pytest.fixture(scope="session", autouse=True)
def _rows_are_unlike_where_asked_for(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--unlike-rows") and importlib.util.find_spec("vllm"):
        from vllm_specrollout.worker.rows import ask_host

        assert not ask_host("bfloat16").attention, "the double is not in place"


def identity_totals() -> list[str]:
    """What this process compared with stock vLLM, if anything."""
    check = sys.modules.get("tests.e2e.identity.check")
    if check is None or not check.TOTAL.requests:
        return []
    return [f"identity against stock vLLM: {check.TOTAL}", *(f"proven tie: {tie}" for tie in check.TOTAL.ties)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["identity"] = identity_totals()


class Totals:
    """Of all processes, printed where no capturing can swallow them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.lines += getattr(node, "workeroutput", {}).get("identity", [])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in [*self.lines, *identity_totals()]:
            terminalreporter.write_line(line)


UNLIKE = Path(__file__).parent / "unlike"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--unlike-rows"):
        # also for the processes that tests start
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(UNLIKE), os.environ.get("PYTHONPATH")]))
        from tests.unlike import unlike_rows

        unlike_rows.install()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Totals())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-snapshots", action="store_true", help="rewrite recorded texts instead of comparing them")
    parser.addoption("--unlike-rows", action="store_true", help="on a host that rounds several rows otherwise than one")


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> Callable[[Path, str], str]:
    """The text that was recorded; `pytest --update-snapshots` records this one, to be reviewed in the diff."""

    def read(path: Path, text: str) -> str:
        if request.config.getoption("--update-snapshots"):
            path.write_text(text, encoding="utf-8")
        return path.read_text(encoding="utf-8")

    return read


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
