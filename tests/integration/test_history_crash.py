"""Engines killed at any moment: no answer that was written is lost, and no token is ever wrong."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tests.integration import history_writer
from tests.unit.history.stored import answers_of
from vllm_specrollout.history.database import Database

NUM_KILLS = 60
KILLS_PER_FILE = 5


class Writers:
    """Starts writers and kills them."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, history_writer.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run_and_kill(self, seed: int, folder: Path) -> list[int]:
        """Numbers of the answers that one writer had written when it died."""
        rng = random.Random(seed)
        self._parent.stdin.write(f"{seed} {folder}\n")
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


def test_no_written_answer_is_lost_when_engines_are_killed_and_who_reads_meanwhile_sees_no_wrong_one(
    tmp_path: Path,
) -> None:
    writers, left_a_log = Writers(), 0
    for number in range(NUM_KILLS // KILLS_PER_FILE):
        folder, known, reader = tmp_path / str(number), set[int](), None
        folder.mkdir()
        path = folder / "answers-0000.history"
        for kill in range(KILLS_PER_FILE):
            done = set(writers.run_and_kill(number * KILLS_PER_FILE + kill, folder)) | known
            left_a_log += path.with_name(path.name + "-wal").exists()
            if done and reader is None:
                # it has the file open while the next ones are killed
                reader = Database(path)
            found = list(reader.rows()) if reader else []
            numbers = [int(row.request) for row in found]
            # the one it was about to acknowledge may be there, whole
            assert numbers == list(range(len(numbers))) and done <= set(numbers) and len(numbers) <= len(done) + 1
            known = set(numbers)
        if reader is not None:
            assert reader.integrity() == "ok"
        for answer in answers_of(path):
            wanted = history_writer.answer_of(int(answer.request_id))
            assert answer.problem_id == wanted.problem_id and np.array_equal(answer.token_ids, wanted.token_ids)
            assert np.array_equal(answer.prompt_ids, wanted.prompt_ids) and answer.reward in (None, 1.0)
        # no killed engine keeps its file from the next one
        assert {one.name.split(".")[0] for one in folder.iterdir()} <= {"answers-0000", "node"}
    writers.close()
    assert left_a_log > NUM_KILLS // 2, "no engine was killed while it wrote, so this test shows less than it says"
