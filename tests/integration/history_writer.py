"""The process that tests/integration/test_history_crash.py kills. It imports what a writer needs, and nothing more.

For each line `SEED FOLDER` on stdin it forks an engine's store, which says on stdout what it has written: `pid P`, then
`done N` once answer N is on no list of what waits, until it is killed; then it says `dead`.
"""

import os
import random
import sys

import numpy as np

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import Answer, FinishReason


def answer_of(number: int) -> Answer:
    """The answer of that number: a few tokens, or so many that writing them takes a while."""
    rng = np.random.default_rng(number)
    count = 20_000 if number % 5 == 4 else int(rng.integers(0, 200))
    tokens = rng.integers(0, 150_000, count).astype(np.int32)
    return Answer(str(number), f"problem-{number % 7}", tokens[:9], tokens, FinishReason.FINISHED, number)


def write_until_killed(seed: int, folder: str) -> None:
    chance = random.Random(seed)
    store = HistoryStore(HistoryConfig(dir=folder, epochs=1024))
    number = store.stats().answers
    while True:
        store.append(answer_of(number))
        assert store.stats().waiting == 0 and store.stats().write_errors == 0
        os.write(1, b"done %d\n" % number)
        choice = chance.random()
        if choice < 0.2:
            store.report_reward(str(number), 1.0)
        elif choice < 0.25:
            store.begin_epoch()
        number += 1


if __name__ == "__main__":
    for line in sys.stdin:
        seed, _, folder = line.strip().partition(" ")
        pid = os.fork()
        if pid == 0:
            write_until_killed(int(seed), folder)
        os.write(1, b"pid %d\n" % pid)
        os.waitpid(pid, 0)
        os.write(1, b"dead\n")
