"""verl's and OpenRLHF's own classes, under Ray: the examples end as they promise. `make trainers` installs both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".trainers"
# engines of this size gain nothing from a second thread; where other processes want the cores, threads wait long
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
pytestmark = [
    pytest.mark.trainers,
    # several servers one after the other, each a minute to start where nothing else runs
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (FOLDER / "verl").is_dir(), reason="verl and OpenRLHF are not here: `make trainers`"),
]


def run(*command: str) -> list[str]:
    """Lines that an example wrote; it ended well."""
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    return done.stdout.splitlines()


# by model runner: how an example is begun, and its answers; V2 is interpreted and slow, so there are few
RUNNERS = [
    pytest.param("examples/{}", 200, id="V1"),
    pytest.param("-m tests.trainers.on_v2 {}", 8, id="V2"),
]


@pytest.mark.parametrize(("command", "count"), RUNNERS)
def test_verls_server_answers_as_stock_goes_on_with_what_it_aborted_and_takes_weights(command: str, count: int) -> None:
    lines = run(*command.format("verl/rollout.py").split())
    *lines, weights = [line for line in lines if "answers" in line]
    assert [line.partition(",")[0] for line in lines] == ["stock", "variable", "variable", "config", "config"]
    for line, is_cut in zip(lines, (False, True, False, True, False), strict=True):
        aborted = int(line.partition(", ")[2].split()[0])
        assert (aborted > 0) is is_cut
        assert line.endswith(f"{count} of {count} answers are those of stock")
    assert weights.startswith("other weights: ")
    assert weights.endswith(f"the first weights again: {count} are as before")


@pytest.mark.parametrize(("command", "count"), RUNNERS)
def test_openrlhfs_actor_answers_as_stock_through_pauses_and_new_weights(command: str, count: int) -> None:
    lines = run(*command.format("openrlhf/rollout.py").split())
    assert lines.count(f"ours: {count} of {count} answers are those of stock") == 2
    (pause,) = [line for line in lines if line.startswith("paused with ")]
    assert int(pause.split()[2]) > 0
    assert lines[-1].startswith("ours, other weights: ")
    assert lines[-1].endswith(f"the first weights again: {count} are as before")


@pytest.mark.parametrize("trainer", ["verl", "openrlhf"])
def test_an_idle_engines_drafter_helps_the_other_ones_straggler_and_answers_are_stocks(trainer: str) -> None:
    *rounds, lent = [line for line in run(f"examples/{trainer}/ladder.py") if " of 8 " in line or "lent" in line]
    assert rounds == ["ours: 8 of 8 answers are those of stock"] * 3
    found = re.fullmatch(r"drafters lent (\d+) times: (\d+) tokens verified, (\d+) accepted", lent)
    assert found is not None and all(int(count) > 0 for count in found.groups())
