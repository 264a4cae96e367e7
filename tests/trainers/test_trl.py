"""TRL's own trainer, unmodified, with the engine in its process: three steps, drafts on, drafts off, and stock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

from tests import warm
from tests.versions import trees

COMPARE = Path(__file__).parents[2] / "examples" / "trl" / "compare.py"
# compiling takes longer than these steps, and changes no token that any of the four runs would not change
PLAIN = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_ATTN_SPLIT_KV": "0"}
FLAGS = ["--one-process", "--steps", "3", "--problems", "4", "--problems-per-step", "2", "--max-tokens", "64"]


def check(output: str) -> None:
    """What it says of four runs of three steps: stock, ours, and drafts on and off."""
    lines = output.splitlines()
    assert "stock and ours: tokens and rewards equal in 3 steps" in lines
    assert "drafts on and drafts off: tokens and rewards equal in 3 steps" in lines
    drafted = {line.partition(":")[0]: line.rpartition(";")[2].split() for line in lines if " from step 3 on; " in line}
    assert int(drafted["ours"][0]) > 0 and int(drafted["drafts on"][0]) > 0
    assert drafted["drafts off"][0] == "0" and drafted["stock"] == ["no", "drafts"]


@pytest.mark.nightly
def test_three_steps_of_grpo_are_those_without_drafts_and_those_of_stock(tmp_path: Path) -> None:
    environment = {**os.environ, **PLAIN}
    done = warm.run([str(COMPARE), *FLAGS, "--record", str(tmp_path / "steps")], environment, tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout)


@pytest.mark.versions
@pytest.mark.timeout(1800)
def test_on_the_vllm_that_trl_asks_for_three_steps_are_those_of_stock(tmp_path: Path) -> None:
    """TRL 1.16 supports vLLM up to 0.31; on the installed one it warns."""
    version = "0.31.0"
    if reason := trees.missing(version):
        pytest.skip(reason)
    command = [sys.executable, str(COMPARE), *FLAGS, "--record", str(tmp_path / "steps")]
    environment = trees.environment(version, **PLAIN)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout)
    assert "TRL currently supports vLLM versions" not in done.stdout + done.stderr


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(COMPARE.parent))
    return pytest.importorskip("compare")


@pytest.mark.parametrize(
    ("drafted", "ratios"),
    [
        ([[5, 6], [7]], ["ours to stock from step 3 on: 0.50", "drafts on to drafts off from step 3 on: 0.50"]),
        ([[5, 6], [8]], ["drafts on to drafts off from step 3 on: 0.50"]),
    ],
)
def test_no_ratio_is_printed_of_runs_whose_tokens_differ(
    compare: Any, capsys: pytest.CaptureFixture[str], drafted: list[list[int]], ratios: list[str]
) -> None:
    plain = [{"step": step, "tokens": [[5, 6], [7]], "rewards": [1.0, 0.0]} for step in range(4)]
    changed = [*plain[:3], {**plain[3], "tokens": drafted}]
    # the first steps are not timed
    slow, fast = [9.0, 9.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]
    results = {
        "stock": compare.Result(plain, slow),
        "ours": compare.Result(changed, fast),
        "drafts on": compare.Result(plain, fast),
        "drafts off": compare.Result(plain, slow),
    }
    assert compare.report(results, 4) is (changed == plain)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(", ")[2] for line in lines if line.startswith("generation time")] == ratios
    assert any("DIFFER" in line for line in lines) is (changed != plain)
