"""Engines on four nodes that share answers through one archive, while the archive and their processes are killed."""

import contextlib
import json
import random
import subprocess
import sys
import threading
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
from tests.waiting import until
from vllm_specrollout.history.database import Database

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

NODES, PROBLEMS, SAMPLES, KILLS = 4, 64, 16, 20
ENGINE = """
import json, sys, time
import numpy as np
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.types import Answer, FinishReason, RequestView
drafter = HistoryDrafter(HistoryConfig(dir=sys.argv[1], url=sys.argv[2], run="kills"))
for line in sys.stdin:
    name, problem, seed = json.loads(line)
    tokens = np.random.default_rng(seed).integers(0, 5000, 120).astype(np.int32)
    drafter.admit(RequestView(name, tokens[:20], 20, 1000, problem_id=problem, name=name))
    drafter.finish(Answer(name, problem, tokens[:20], tokens[20:], FinishReason.FINISHED, 0, name))
    drafter.forget(name)
    # what it says is kept, it has counted as written
    while drafter.store.stats().waiting:
        time.sleep(1e-3)
    print(name, flush=True)
"""


class Process:
    """One of Python's, which is begun anew whenever it was killed."""

    def __init__(self, stack: contextlib.ExitStack, *arguments: object) -> None:
        self._command = [sys.executable, "-c", *map(str, arguments)]
        self.begin()
        stack.callback(self.kill)

    def begin(self) -> None:
        self.own = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def kill(self) -> None:
        self.own.kill()
        self.own.wait()

    def ask(self, *what: object) -> str:
        assert self.own.stdin is not None and self.own.stdout is not None
        self.own.stdin.write(json.dumps(what) + "\n")
        self.own.stdin.flush()
        return self.own.stdout.readline().strip()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as own:
        yield own


@pytest.fixture
def archive(stack: contextlib.ExitStack, tmp_path: Path) -> Process:
    serve = "from vllm_specrollout.cli import main; main()"
    return Process(stack, serve, "history", "serve", tmp_path / "archive", "--listen", f"ipc://{tmp_path}/s")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Of the nodes."""
    return [tmp_path / f"node{i}" for i in range(NODES)]


def test_nothing_that_was_acknowledged_is_lost_over_twenty_kills(stack, archive, folders, tmp_path) -> None:
    engines = [Process(stack, ENGINE, folder, f"ipc://{tmp_path}/s") for folder in folders]
    rng = random.Random(3)
    asked = [(f"{problem}-{sample}", f"p{problem}") for problem in range(PROBLEMS) for sample in range(SAMPLES)]
    rng.shuffle(asked)
    kills = set(rng.sample(range(len(asked)), KILLS))
    for number, (name, problem) in enumerate(asked):
        if number in kills:
            victim = rng.choice([archive, *engines])
            victim.kill()
            victim.begin()
        assert engines[number % NODES].ask(name, problem, number) == name, "each is asked of an engine that lives"
    acknowledged = {name for name, _ in asked}
    await_all(acknowledged, folders)
    assert acknowledged <= found(tmp_path / "archive")


def found(folder: Path) -> set[str]:
    """Requests whose answers a folder has."""
    names = set[str]()
    for path in folder.glob("*.history"):
        with contextlib.suppress(Exception):
            names |= {row.request.decode() for row in Database(path).rows()}
    return names


def await_all(names: set[str], folders: list[Path]) -> None:
    """Every node comes to have every answer."""
    until(lambda: all(names <= found(folder) for folder in folders), 120.0)


LENGTH = 32
# what an engine is asked for at once
CALL = 32
ARGUMENTS = {"model": str(CHECKPOINT), "dtype": "float32", "max_model_len": 256, "enforce_eager": True}
# its steps are short, and the engines share the host: threads that wait for each other would take most of it; and one
# within the asking process tells its last answers with its next step (docs/limits.md), which comes too late
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def process(stack: contextlib.ExitStack, name: str, spec_rollout: dict[str, Any] | None = None) -> EngineProcess:
    more = {"has_plugin": spec_rollout is not None, "spec_rollout": spec_rollout, "environment": ENVIRONMENT}
    return stack.enter_context(EngineProcess(EngineSpec(name=name, arguments=ARGUMENTS, **more)))


def generated(engine: EngineProcess, rows: list[tuple[int, int]], prompts: list[list[int]], epoch: int) -> list[Run]:
    """These (problem, sample)s, call by call, so that what others have answered meanwhile can draft."""
    is_ours, found = engine.spec.spec_rollout is not None, []
    common = {"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True}
    for first in range(0, len(rows), CALL):
        own = rows[first : first + CALL]
        params = [
            {
                **common,
                "seed": epoch * 10**6 + problem * 100 + sample,
                "extra_args": {"spec_rollout": {"problem_id": f"p{problem}"}} if is_ours else None,
            }
            for problem, sample in own
        ]
        ids = [f"{epoch}-{problem}-{sample}" for problem, sample in own]
        asked = {"prompts": [prompts[problem] for problem, _ in own], "params": params, "ids": ids}
        found.append(Run.from_child(engine.ask("generate", stats=is_ours, **asked)))
    return found


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
    stack, archive, folders, tmp_path
) -> None:
    """Each has a quarter of the problems in one epoch, and another's quarter in the next."""
    rng = random.Random(5)
    texts = [problem.prompt for problem in problems(PROBLEMS, 0)]
    quarters = [[(p, s) for p in range(node, PROBLEMS, NODES) for s in range(SAMPLES)] for node in range(NODES)]
    stock = process(stack, "stock")
    prompts = stock.ask("encode", texts=texts)
    truth = [[tokens(generated(stock, rows, prompts, epoch)) for rows in quarters] for epoch in (0, 1)]
    stock.close()
    histories = [{"dir": str(folder), "url": f"ipc://{tmp_path}/s", "run": "kills"} for folder in folders]
    settings = [{"drafters": ["history"], "budget": "fixed", "history": history} for history in histories]
    engines = [process(stack, f"node {i}", own) for i, own in enumerate(settings)]
    pool = stack.enter_context(ThreadPoolExecutor(NODES + 1))
    for epoch in (0, 1):
        is_over = threading.Event()
        killing = pool.submit(kill_over_and_over, archive, rng, is_over)
        dealt = [quarters[(node + epoch) % NODES] for node in range(NODES)]
        asked = [
            pool.submit(generated, engine, rows, prompts, epoch) for engine, rows in zip(engines, dealt, strict=True)
        ]
        try:
            runs = [one.result() for one in asked]
        finally:
            is_over.set()
        assert killing.result() >= KILLS
        for node, own in enumerate(runs):
            assert tokens(own) == truth[epoch][(node + epoch) % NODES], f"stock's tokens on node {node}"
        await_all({f"{e}-{p}-{s}" for e in range(epoch + 1) for rows in quarters for p, s in rows}, folders)
    for own in runs:
        first = own[0].totals
        # of this quarter it had answered nothing itself before
        assert first is not None and first.accepted > LENGTH, "what the others answered drafts"
