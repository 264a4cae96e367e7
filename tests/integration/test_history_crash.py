"""Writers killed at any moment, files damaged anywhere: no acknowledged answer is lost, no token is ever wrong."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.integration import history_writer
from vllm_specrollout.history.frames import HEADER, VERSION, HistoryError
from vllm_specrollout.history.log import Reader, Writer
from vllm_specrollout.history.records import Answer, decode_record

NUM_KILLS = 200
KILLS_PER_FILE = 5
NUM_DAMAGES = 200
DAMAGES = ("flip", "cut", "zero", "duplicate", "garbage", "shorten")


def answers_in(path: Path) -> list[Answer]:
    records = [decode_record(frame.payload) for frame, _ in Reader(path).records()]
    return [record for record in records if isinstance(record, Answer)]


def assert_right(answer: Answer) -> None:
    wanted = history_writer.answer_of(int(answer.request_id))
    assert answer.problem_id == wanted.problem_id and answer.epoch == wanted.epoch
    assert np.array_equal(answer.token_ids, wanted.token_ids)
    assert np.array_equal(answer.prompt_tail, wanted.prompt_tail)


class Writers:
    """Starts writers and kills them."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, history_writer.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run_and_kill(self, seed: int, path: Path) -> list[int]:
        """Numbers of the answers that one writer had handed over when it died."""
        rng = random.Random(seed)
        self._parent.stdin.write(f"{seed} {path}\n")
        self._parent.stdin.flush()
        pid, done, patience = None, [], rng.randrange(12)
        while (line := self._parent.stdout.readline()) != "dead\n":
            word, number = line.split()
            if word == "pid":
                pid = int(number)
            else:
                done.append(int(number))
            if pid is not None and len(done) >= patience:
                # at no set place: somewhere in the next few records
                time.sleep(rng.random() * 0.01)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                patience = 1 << 30
        return done

    def close(self) -> None:
        self._parent.stdin.close()
        self._parent.wait()


def test_no_acknowledged_answer_is_lost_when_writers_are_killed(tmp_path):
    writers = Writers()
    torn = rewriting = 0
    for number in range(NUM_KILLS // KILLS_PER_FILE):
        path, done = tmp_path / f"{number}.history", set()
        for kill in range(KILLS_PER_FILE):
            done |= set(writers.run_and_kill(number * KILLS_PER_FILE + kill, path))
            # a writer may die before its file is there
            found = answers_in(path) if path.exists() else []
            numbers = [int(answer.request_id) for answer in found]
            assert done <= set(numbers)
            # the one it was about to acknowledge may be there, whole
            assert numbers == list(range(len(numbers))) and len(numbers) <= len(done) + 1
            left = path.with_name(path.name + ".new").exists()
            size = path.stat().st_size if found else 0
            writer = Writer(path)
            torn += writer.size < size
            rewriting += left
            writer.close(sync=False)
            done = set(numbers)
        for answer in found:
            assert_right(answer)
        path.unlink()
        assert not list(tmp_path.iterdir())
    writers.close()
    assert torn > 0, "no record was ever torn, so this test shows less than it says"
    print(f"of {NUM_KILLS} kills, {torn} tore a record and {rewriting} came while a file was rewritten")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The bytes of a file of 30 answers, and where each of them stands."""
    path = tmp_path_factory.mktemp("sound") / "sound.history"
    writer, spans = Writer(path), []
    for number in (n for n in range(40) if n % 5 != 4):
        start = writer.append(history_writer.answer_of(number)).offset
        spans.append((str(number), start, writer.size))
    writer.close()
    return path.read_bytes(), spans


def damaged(data: bytes, kind: str, rng: random.Random) -> tuple[bytes, int, int]:
    """The bytes after the damage, and which of the old ones it hit; inserting hits what stands around one place."""
    first = rng.randrange(HEADER.size) if rng.random() < 0.1 else rng.randrange(HEADER.size, len(data))
    last = min(len(data), first + rng.choice([1, 3, 30, 300, 3000]))
    if kind == "flip":
        return data[:first] + bytes([data[first] ^ 1 << rng.randrange(8)]) + data[first + 1 :], first, first + 1
    if kind == "cut":
        return data[:first] + data[last:], first, last
    if kind == "zero":
        return data[:first] + bytes(last - first) + data[last:], first, last
    if kind == "shorten":
        return data[:first], first, len(data)
    source = rng.randrange(len(data))
    piece = data[source : source + last - first] if kind == "duplicate" else rng.randbytes(last - first)
    # behind the byte before it and in front of the one after it: what spans the place is torn apart
    return data[:first] + piece + data[first:], first, first


def test_damage_anywhere_costs_only_what_it_touches(sound, tmp_path):
    data, spans = sound
    path = tmp_path / "damaged.history"
    for seed in range(NUM_DAMAGES):
        rng = random.Random(seed)
        after, first, last = damaged(data, DAMAGES[seed % len(DAMAGES)], rng)
        path.write_bytes(after)
        try:
            found = answers_in(path)
        except HistoryError as error:
            assert first < HEADER.size, f"damage {seed} left the header alone"
            assert str(path) in error.cause and f"version {VERSION}" in error.cause
            continue
        assert first >= HEADER.size or len(after) < HEADER.size or after[: HEADER.size] == data[: HEADER.size]
        for answer in found:
            assert_right(answer)
        got = [answer.request_id for answer in found]
        untouched = [name for name, start, end in spans if end <= first or (start >= last and first >= HEADER.size)]
        assert len(set(got)) == len(got) and set(untouched) <= set(got), f"damage {seed}"
        writer = Writer(path)
        writer.append(history_writer.answer_of(100))
        writer.close(sync=False)
        again = [answer.request_id for answer in answers_in(path)]
        assert again == [*got, "100"], f"damage {seed}"
