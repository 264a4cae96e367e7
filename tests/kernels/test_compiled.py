"""Every kernel compiles for every GPU that is promised, and fits there. Compiled without one (compiled.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.compiled import GPUS, HOPPER, TABLE, cell, jobs
from tests.versions.trees import ROOT

KERNELS = {"_attend", "_sample_blocks", "_walk_trees", "_move", "_scan", "_vote", "_lay_out", "_choose", "_noise_of"}
MOST_SPILLED = 8
"""Bytes that a thread may keep in memory for want of registers."""
TABLES: dict[str, list[dict[str, Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
HERE = metadata.version("triton")


def compile_all(gpus: list[int], cases: str) -> list[dict[str, Any]]:
    """What the kernels become with the installed Triton."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled", "--gpus", ",".join(map(str, gpus)), "--cases", cases]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def check(found: list[dict[str, Any]]) -> None:
    """It is what the table says."""
    known = {(row["case"], row["kernel"], row["form"]): row["gpus"] for row in TABLES[HERE]}
    for row in found:
        said = known[row["case"], row["kernel"], row["form"]][str(row["gpu"])]
        assert said == cell(row), f"{row}: run `make compiled`"


def test_on_hopper_the_kernels_are_those_of_the_table() -> None:
    cases = (
        r"4 per key \(Qwen3-8B\)$|^24 drafts of 151,936 tokens$|^8 key heads|^lookups of 16 tokens$|^rows of|^the best"
    )
    found = compile_all([90], cases)
    check(found)
    assert {row["kernel"] for row in found} == KERNELS
    attention = next(row for row in found if row["kernel"] == "_attend")
    assert attention["products"] and all("wgmma" in word for word in attention["products"])


@pytest.mark.nightly
def test_all_kernels_are_those_of_the_table() -> None:
    found = compile_all([*GPUS], "")
    assert {(row["case"], row["gpu"]) for row in found} == set(jobs(GPUS, ""))
    check(found)


@pytest.mark.parametrize("version", TABLES)
def test_every_kernel_fits_every_gpu_and_spills_little(version: str) -> None:
    cells = [(row, int(gpu), cell) for row in TABLES[version] for gpu, cell in row["gpus"].items()]
    assert {(row["case"], gpu) for row, gpu, _ in cells} == set(jobs(GPUS if version == HERE else [HOPPER], ""))
    for row, gpu, (_, spilled, shared, programs) in cells:
        assert shared <= GPUS[gpu].shared_memory and programs >= 1, (row, gpu)
        assert spilled <= MOST_SPILLED, (row, gpu)
