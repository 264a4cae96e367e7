"""verl's and OpenRLHF's own classes, under Ray: the examples end as they promise. `make trainers` installs both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".trainers"
pytestmark = [
    pytest.mark.trainers,
    # several servers one after the other, each a minute to start where nothing else runs
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (FOLDER / "ray").is_dir(), reason="verl, OpenRLHF and Ray are not here: `make trainers`"),
]


def run(example: str) -> list[str]:
    """Lines that it wrote; it ended well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example)],
        env=environment,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    return done.stdout.splitlines()


def test_verls_server_answers_as_stock_goes_on_with_what_it_aborted_and_takes_weights() -> None:
    *lines, weights = [line for line in run("verl/rollout.py") if "answers" in line]
    assert [line.partition(",")[0] for line in lines] == ["stock", "variable", "variable", "config", "config"]
    for line, is_cut in zip(lines, (False, True, False, True, False), strict=True):
        aborted = int(line.partition(", ")[2].split()[0])
        assert (aborted > 0) is is_cut
        assert line.endswith("200 of 200 answers are those of stock")
    assert weights.startswith("other weights: ") and weights.endswith("the first weights again: 200 are as before")


def test_openrlhfs_actor_answers_as_stock_through_pauses_and_new_weights() -> None:
    lines = run("openrlhf/rollout.py")
    assert lines.count("ours: 200 of 200 answers are those of stock") == 2
    (pause,) = [line for line in lines if line.startswith("paused with ")]
    assert int(pause.split()[2]) > 0
    assert lines[-1].startswith("ours, other weights: ")
    assert lines[-1].endswith("the first weights again: 200 are as before")
