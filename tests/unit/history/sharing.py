"""One engine of several that share a directory: `python sharing.py FOLDER NUMBER ROUNDS`; it prints what went wrong."""

from __future__ import annotations

import json
import random
import sys

import numpy as np

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history.background import Background
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import Answer, FinishReason


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


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
