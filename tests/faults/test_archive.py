"""Engines on four nodes that share answers through one archive, while the archive and their processes are killed."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm_specrollout._core")
pytest.importorskip("zmq")

from vllm_specrollout.history.database import Database

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

NODES, PROBLEMS, SAMPLES, KILLS = 4, 64, 16, 20
ENGINE = """
import json, sys, time
import numpy as np
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.types import FinishedRequest, FinishReason, RequestView
folder, url, node = sys.argv[1], sys.argv[2], int(sys.argv[3])
drafter = HistoryDrafter(HistoryConfig(dir=folder, url=url))
for line in sys.stdin:
    request = json.loads(line)
    name, problem = request["name"], request["problem"]
    rng = np.random.default_rng(request["seed"])
    tokens = rng.integers(0, 5000, 120).astype(np.int32)
    view = RequestView(name, tokens[:20], 20, 1000, problem_id=problem, name=name)
    drafter.admit(view)
    drafter.finish(FinishedRequest(name, problem, tokens[:20], tokens[20:], FinishReason.FINISHED, 0, name))
    drafter.forget(name)
    # what it says is kept, it has counted as written
    while drafter.store.stats().waiting:
        time.sleep(1e-3)
    print(name, flush=True)
drafter.close()
"""


class Process:
    """A process that is begun anew whenever it was killed."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self.begin()

    def begin(self) -> None:
        self.own = subprocess.Popen(
            [sys.executable, *self._arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def kill(self) -> None:
        self.own.send_signal(signal.SIGKILL)
        self.own.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[tuple[Process, list[Process]]]:
    address = f"ipc://{tmp_path}/s"
    command = ["-c", "from vllm_specrollout.cli import main; main()", "history", "serve"]
    archive = Process([*command, str(tmp_path / "archive"), "--listen", address])
    engines = [Process(["-c", ENGINE, str(tmp_path / f"node{i}"), address, str(i)]) for i in range(NODES)]
    yield archive, engines
    for one in (archive, *engines):
        with contextlib.suppress(ProcessLookupError):
            one.kill()


def test_nothing_that_was_acknowledged_is_lost_over_twenty_kills(
    processes: tuple[Process, list[Process]], tmp_path: Path
) -> None:
    archive, engines = processes
    rng = random.Random(3)
    asked = [(f"p{problem}", f"{problem}-{sample}") for problem in range(PROBLEMS) for sample in range(SAMPLES)]
    rng.shuffle(asked)
    kills = sorted(rng.sample(range(len(asked)), KILLS))
    acknowledged = set[str]()
    for number, (problem, name) in enumerate(asked):
        engine = engines[number % NODES]
        if number in kills:
            victim = rng.choice([archive, *engines])
            victim.kill()
            victim.begin()
        assert engine.own.stdin is not None and engine.own.stdout is not None
        engine.own.stdin.write(json.dumps({"name": name, "problem": problem, "seed": number}) + "\n")
        engine.own.stdin.flush()
        if name == engine.own.stdout.readline().strip():
            acknowledged.add(name)
    assert len(acknowledged) == len(asked), "each is asked of an engine that lives"
    until = time.monotonic() + 120
    while not all(acknowledged <= found(tmp_path / f"node{i}") for i in range(NODES)):
        assert time.monotonic() < until, [len(acknowledged - found(tmp_path / f"node{i}")) for i in range(NODES)]
        time.sleep(0.5)
    assert acknowledged <= found(tmp_path / "archive")


def found(folder: Path) -> set[str]:
    """Requests whose answers a folder has."""
    names = set[str]()
    for path in folder.glob("*.history"):
        with contextlib.suppress(Exception):
            names |= {row.request.decode() for row in Database(path).rows()}
    return names
