"""Engines on four nodes that share answers through one archive, while the archive and their processes are killed."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_specrollout._core")
pytest.importorskip("zmq")

from vllm_specrollout.bench.policy import CHECKPOINT
from vllm_specrollout.bench.policy.reward import problems

from bench.runner.engine_process import EngineProcess, EngineSpec
from bench.runner.rows import Run
from vllm_specrollout.history.database import Database

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

NODES, PROBLEMS, SAMPLES, KILLS = 4, 64, 16, 20
ENGINE = """
import json, sys, time
import numpy as np
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.types import Answer, FinishReason, RequestView
folder, url, node = sys.argv[1], sys.argv[2], int(sys.argv[3])
drafter = HistoryDrafter(HistoryConfig(dir=folder, url=url, run="kills"))
for line in sys.stdin:
    request = json.loads(line)
    name, problem = request["name"], request["problem"]
    rng = np.random.default_rng(request["seed"])
    tokens = rng.integers(0, 5000, 120).astype(np.int32)
    view = RequestView(name, tokens[:20], 20, 1000, problem_id=problem, name=name)
    drafter.admit(view)
    drafter.finish(Answer(name, problem, tokens[:20], tokens[20:], FinishReason.FINISHED, 0, name))
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
    await_all(acknowledged, [tmp_path / f"node{i}" for i in range(NODES)])
    assert acknowledged <= found(tmp_path / "archive")


def found(folder: Path) -> set[str]:
    """Requests whose answers a folder has."""
    names = set[str]()
    for path in folder.glob("*.history"):
        with contextlib.suppress(Exception):
            names |= {row.request.decode() for row in Database(path).rows()}
    return names


LENGTH = 32
# what an engine is asked for at once
CALL = 32
ARGUMENTS = {"model": str(CHECKPOINT), "dtype": "float32", "max_model_len": 256, "enforce_eager": True}


def spec(name: str, spec_rollout: dict[str, Any] | None) -> EngineSpec:
    # its steps are short, and the engines share the host: threads that wait for each other would take most of it
    environment = {
        "OMP_NUM_THREADS": "1",
        # one within the asking process tells its last answers with its next step (docs/limits.md), which comes too late
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    is_ours = spec_rollout is not None
    return EngineSpec(
        name=name, arguments=ARGUMENTS, has_plugin=is_ours, spec_rollout=spec_rollout, environment=environment
    )


def asked_for(rows: list[tuple[int, int]], prompts: list[list[int]], epoch: int, is_ours: bool) -> dict[str, Any]:
    """What `generate` is told of these (problem, sample)s."""
    own = [{"extra_args": {"spec_rollout": {"problem_id": f"p{problem}"}}} if is_ours else {} for problem, _ in rows]
    seeds = [epoch * 10**6 + problem * 100 + sample for problem, sample in rows]
    common = {"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True}
    return {
        "prompts": [prompts[problem] for problem, _ in rows],
        "params": [{**common, "seed": seed, **more} for seed, more in zip(seeds, own, strict=True)],
        "ids": [f"{epoch}-{problem}-{sample}" for problem, sample in rows],
    }


def generated(engine: EngineProcess, rows: list[tuple[int, int]], prompts: list[list[int]], epoch: int) -> list[Run]:
    """Call by call, so that what others have answered meanwhile can draft."""
    is_ours = engine.spec.spec_rollout is not None
    calls = [rows[first : first + CALL] for first in range(0, len(rows), CALL)]
    told = [asked_for(call, prompts, epoch, is_ours) for call in calls]
    return [Run.from_child(engine.ask("generate", stats=is_ours, **one)) for one in told]


def tokens(runs: list[Run]) -> list[tuple[int, ...]]:
    return [own for run in runs for own in run.token_ids]


def kill_over_and_over(archive: Process, rng: random.Random, is_over: threading.Event) -> int:
    """How often it was killed: until the engines are done, and as often as is asked for at least."""
    kills = 0
    while kills < KILLS or not is_over.is_set():
        archive.kill()
        archive.begin()
        kills += 1
        is_over.wait(rng.uniform(0.2, 2.0))
    return kills


def test_engines_on_four_nodes_answer_as_stock_and_draft_what_the_others_answered_while_the_archive_is_killed(
    tmp_path: Path,
) -> None:
    """Each has a quarter of the problems in one epoch, and another's quarter in the next."""
    address, rng = f"ipc://{tmp_path}/s", random.Random(5)
    texts = [problem.prompt for problem in problems(PROBLEMS, 0)]
    quarters = [[(p, s) for p in range(node, PROBLEMS, NODES) for s in range(SAMPLES)] for node in range(NODES)]
    serve = ["-c", "from vllm_specrollout.cli import main; main()", "history", "serve", str(tmp_path / "archive")]
    with contextlib.ExitStack() as stack:
        stock = stack.enter_context(EngineProcess(spec("stock", None)))
        prompts = stock.ask("encode", texts=texts)
        truth = [[tokens(generated(stock, rows, prompts, epoch)) for rows in quarters] for epoch in (0, 1)]
        stock.close()
        archive = Process([*serve, "--listen", address])
        stack.callback(lambda: archive.kill())
        folders = [tmp_path / f"node{node}" for node in range(NODES)]
        own = [
            {"drafters": ["history"], "budget": "fixed", "history": {"dir": str(one), "url": address, "run": "kills"}}
            for one in folders
        ]
        engines = [stack.enter_context(EngineProcess(spec(f"node {i}", one))) for i, one in enumerate(own)]
        pool = stack.enter_context(ThreadPoolExecutor(NODES + 1))
        for epoch in (0, 1):
            is_over = threading.Event()
            killing = pool.submit(kill_over_and_over, archive, rng, is_over)
            dealt = [(node + epoch) % NODES for node in range(NODES)]
            asked = [
                pool.submit(generated, engine, quarters[quarter], prompts, epoch)
                for engine, quarter in zip(engines, dealt, strict=True)
            ]
            try:
                runs = [one.result() for one in asked]
            finally:
                is_over.set()
            assert killing.result() >= KILLS
            for node, quarter in enumerate(dealt):
                assert tokens(runs[node]) == truth[epoch][quarter], f"stock's tokens on node {node}"
            names = {f"{e}-{p}-{s}" for e in range(epoch + 1) for p in range(PROBLEMS) for s in range(SAMPLES)}
            await_all(names, folders)
        totals = [[run.totals for run in own] for own in runs]
        for own_totals in totals:
            first = own_totals[0]
            assert first is not None
            # of this quarter it had answered nothing itself before
            assert first.accepted > LENGTH, "what the others answered drafts"


def await_all(names: set[str], folders: list[Path]) -> None:
    """Every node comes to have every answer."""
    until = time.monotonic() + 120
    while missing := [len(names - found(folder)) for folder in folders if names - found(folder)]:
        assert time.monotonic() < until, missing
        time.sleep(0.5)
