"""Every kernel compiles for every GPU that is promised, and fits there. Compiled without one (compiled.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from importlib import metadata
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from vllm_specrollout.kernels.tree_attention.launch import default_tile, shared_memory_of

from tests.kernels.compiled import GPUS, HOPPER, TABLE, cell, jobs
from tests.versions.trees import ROOT

# bytes that a thread may keep in memory for want of registers, by (is Hopper, kernel). The tiles are Hopper's; heads of
# 256 with a window and a cap take most there, two accumulators without warpgroup instructions elsewhere.
MOST_SPILLED = {
    (is_hopper, kernel): most if kernel == "_attend" else 8
    for is_hopper, most in ((True, 1100), (False, 1300))
    for kernel in ("_attend", "_merge", "_sample_blocks", "_walk_trees", "_move", "_scan", "_vote", "_lay_out", "_choose")
}
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
    """It is what the table says, and no tile's height shows in a row's bits."""
    known = {(row["case"], row["kernel"], row["form"]): row["gpus"] for row in TABLES[HERE]}
    arithmetic = defaultdict(set)
    for row in found:
        said = known[row["case"], row["kernel"], row["form"]][str(row["gpu"])]
        assert said == cell(row), f"{row}: run `make compiled`"
        if row["kernel"] == "_attend":
            arithmetic[row["case"], row["gpu"]].add(tuple(row["arithmetic"]))
    for heights in arithmetic.values():
        assert len(heights) == 1, heights


def test_on_hopper_the_kernels_are_those_of_the_table() -> None:
    """One model's attention in all its forms; only if these are made of the same instructions, a row's bits are the
    same in a tall tile and in a low one."""
    cases = r"4 per key \(Qwen3-8B\)$|^24 drafts of 151,936 tokens$|^8 key heads|^lookups of 16 tokens$|^rows of|^the best"
    found = compile_all([90], cases)
    check(found)
    assert {row["kernel"] for row in found} == {kernel for is_hopper, kernel in MOST_SPILLED if is_hopper}
    words = [row["arithmetic"] for row in found if row["kernel"] == "_attend"]
    assert len(words) == 5
    assert all(any("wgmma" in word for word in row) for row in words)
    assert all([word for word in row if word.startswith("#")] == ["#mma"] for row in words)


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
        assert spilled <= MOST_SPILLED[gpu == HOPPER, row["kernel"]], (row, gpu)


def test_what_fits_no_tile_gets_none() -> None:
    """As on a T4, whose programs have 64 KiB."""
    assert default_tile(torch.bfloat16, 256, 227 << 10).block_m == (64,)
    assert default_tile(torch.bfloat16, 256, 99 << 10).block_m == (32,)
    with pytest.raises(ValueError, match="heads of 64 elements, for which .* 99 KiB .* has 64"):
        default_tile(torch.bfloat16, 64, 64 << 10)
    assert shared_memory_of(torch.device("cpu")) >= 227 << 10
