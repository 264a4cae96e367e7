"""TRL's own trainer, unmodified, with the engine in its process: three steps, drafts on, drafts off, and stock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

from tests import warm

COMPARE = Path(__file__).parents[2] / "examples" / "trl" / "compare.py"


def test_three_steps_of_grpo_are_those_without_drafts_and_those_of_stock(tmp_path: Path) -> None:
    # compiling takes longer than these steps, and changes no token that any of the four runs would not change
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_ATTN_SPLIT_KV": "0"}
    flags = ["--one-process", "--steps", "3", "--problems", "4", "--problems-per-step", "2", "--max-tokens", "64"]
    done = warm.run([str(COMPARE), *flags, "--record", str(tmp_path / "steps")], environment, tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "stock and ours: tokens and rewards equal in 3 steps" in lines
    assert "drafts on and drafts off: tokens and rewards equal in 3 steps" in lines
    drafted = {line.partition(":")[0]: line.rpartition(";")[2].split() for line in lines if " from step 3 on; " in line}
    assert int(drafted["ours"][0]) > 0 and int(drafted["drafts on"][0]) > 0
    assert drafted["drafts off"][0] == "0" and drafted["stock"] == ["no", "drafts"]


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
