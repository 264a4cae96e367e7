"""The process that tests/integration/test_history_crash.py kills. It imports what a writer needs, and nothing more.

For each line `SEED PATH` on stdin it forks a writer, which says on stdout what it has handed over: `pid P`, then
`done N` after each answer N, until it is killed; then it says `dead`.
"""

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np

from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.log import Writer
from vllm_specrollout.history.records import AnswerHead, EpochRecord, RewardRecord
from vllm_specrollout.types import FinishReason


def answer_of(number: int) -> Answer:
    """The answer of that number: a few tokens, or so many that writing them takes a while."""
    rng = np.random.default_rng(number)
    count = 20_000 if number % 5 == 4 else int(rng.integers(0, 200))
    tokens = rng.integers(0, 150_000, count).astype(np.int32)
    return Answer(f"problem-{number % 7}", str(number), number // 50, number, FinishReason.FINISHED, tokens, tokens[:9])


def write_in_pieces(last: int) -> None:
    """Short writes, as a busy file system may do them. At the `last` one the process kills itself, to be sure that a
    record is torn; 0: it does not."""
    write, count = os.pwrite, 0

    def piece(fd: int, data: bytes, offset: int) -> int:
        nonlocal count
        count += 1
        done = write(fd, data[:64], offset)
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    os.pwrite = piece


def write_until_killed(seed: int, path: Path) -> None:
    random.seed(seed)
    if seed % 2:
        write_in_pieces(random.randrange(1, 1000) if seed % 4 == 1 else 0)
    numbers: list[int] = []
    writer = Writer(path, lambda frame, head: isinstance(head, AnswerHead) and numbers.append(int(head.request_id)))
    number = max(numbers, default=-1) + 1
    while True:
        frame = writer.append(answer_of(number))
        numbers.append(number)
        os.write(1, b"done %d\n" % number)
        number += 1
        choice = random.random()
        if choice < 0.1:
            writer.append(RewardRecord(frame.sequence, str(number), 1.0))
        elif choice < 0.12:
            writer.append(EpochRecord(number))
            writer.sync()
        elif choice < 0.15:
            writer.rewrite(answer_of(kept) for kept in numbers)


if __name__ == "__main__":
    for line in sys.stdin:
        seed, _, path = line.strip().partition(" ")
        pid = os.fork()
        if pid == 0:
            write_until_killed(int(seed), Path(path))
        os.write(1, b"pid %d\n" % pid)
        os.waitpid(pid, 0)
        os.write(1, b"dead\n")
