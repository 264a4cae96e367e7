"""Several processes with one directory: each has a file of its own, and none reads what nobody wrote."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.unit.history.stored import answers_of
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history import upkeep
from vllm_specrollout.history.background import Background
from vllm_specrollout.history.database import files
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import Answer, FinishReason

ENGINES, ROUNDS = 4, 12
PATIENCE_S = 120  # no test waits so long unless it fails


def answer_of(engine: int, number: int, epoch: int) -> Answer:
    """What an engine's answer of that number is, whoever asks."""
    rng = np.random.default_rng([engine, number])
    ids = rng.integers(0, 1000, int(rng.integers(1, 200))).astype(np.int32)
    name = f"{engine}-{number}"
    return Answer(name, f"p{number % 5}", ids[:5], ids, FinishReason.FINISHED, number, epoch=epoch)


def is_right(answer: Answer) -> bool:
    engine, number = map(int, answer.request_id.split("-"))
    truth = answer_of(engine, number, answer.epoch)
    return answer.problem_id == truth.problem_id and np.array_equal(answer.token_ids, truth.token_ids)


def run(path: str, engine: int, rounds: int) -> dict[str, object]:
    """One engine of several; what went wrong."""
    chance, number, wrong, seen = random.Random(engine), 0, list[str](), 0
    config = HistoryConfig(dir=path, epochs=1)
    for round_ in range(rounds):
        background = Background("disk").submit if round_ % 2 else (lambda task: task())
        store = HistoryStore(config, background)
        if not round_:
            # all are open at once
            print(store._folder.own.path.name, flush=True)
            sys.stdin.readline()
        for _ in range(chance.randrange(40)):
            number += 1
            store.append(answer_of(engine, number, store.epoch))
            if chance.random() < 0.3:
                store.report_reward(f"{engine}-{number}", chance.random())
            if chance.random() < 0.2:
                store.begin_epoch()
            if chance.random() < 0.3:
                problem = f"p{chance.randrange(5)}"
                found = [store.read(located, problem) for located in store.find(problem)]
                seen += len(found)
                wrong += [str(one) for one in found if one is not None and not is_right(one)]
        store.close()
        if store.stats().write_errors:
            wrong.append("it could not write")
    return {"wrong": wrong, "written": number, "seen": seen}


def test_processes_that_share_a_directory_write_files_of_their_own_and_read_nothing_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.history.test_sharing", str(tmp_path)]
    engines = [
        subprocess.Popen([*command, str(engine), str(ROUNDS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for engine in range(ENGINES)
    ]
    try:
        names = [engine.stdout.readline().strip() for engine in engines]
        assert sorted(names) == [f"answers-{number:04d}.history" for number in range(ENGINES)]
        # all are open; from here on they write, begin epochs, drop, close and open again at the same time
        for engine in engines:
            engine.stdin.write("\n")
            engine.stdin.flush()
        found = [json.loads(engine.communicate(timeout=PATIENCE_S)[0]) for engine in engines]
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()
    assert [one["wrong"] for one in found] == [[]] * ENGINES and all(engine.returncode == 0 for engine in engines)
    assert all(one["written"] > 100 for one in found) and sum(one["seen"] for one in found) > 100
    reports = [upkeep.inspect(path) for path in files(tmp_path)]
    assert sum(report.answers for report in reports) > 0
    assert all(report.damaged == 0 and report.integrity == "ok" for report in reports)
    assert all(is_right(answer) for path in files(tmp_path) for answer in answers_of(path))


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
