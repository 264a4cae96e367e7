"""`specrollout try` as its user runs it: stock first, then ours, and the page at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm_specrollout.bench.policy import CHECKPOINT
from vllm_specrollout.bench.policy.reward import problems

from tests.unit.report.pages import islands


@pytest.mark.nightly
def test_a_users_model_and_prompts_are_tried_in_one_command(tmp_path: Path) -> None:
    asked = [{"prompt": [{"role": "user", "content": one.prompt}]} for one in problems(4, 0)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(one) + "\n" for one in asked), encoding="utf-8")
    sizes = ["--samples", "2", "--batch", "8", "--max-tokens", "96", "--eager", "--kv-gib", "1", "--dtype", "float32"]
    done = subprocess.run(
        [Path(sys.executable).with_name("specrollout"), "try", str(CHECKPOINT), "--prompts", str(prompts), *sizes,
         "--report", str(tmp_path / "try.html"), "--out", str(tmp_path / "try.json")],
        capture_output=True, text=True, timeout=600, cwd=tmp_path, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if "stock vLLM" in line]
    assert lines[0].startswith(("the very tokens of stock vLLM: ", "stock vLLM's tokens, but for "))
    rows = json.loads((tmp_path / "try.json").read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == ["epoch 1", "epoch 2"]
    assert all(row["tokens_per_step"] > 1.0 for row in rows), "drafts were accepted"
    # the warm-up, and the epochs
    *_, first, second = islands((tmp_path / "try.html").read_text(encoding="utf-8"))["summary"]["rollouts"]
    for row, drawn in zip(rows, (first, second), strict=True):
        assert (drawn["requests"], drawn["tokens"]) == (8, row["output_tokens"])
        assert drawn["verified"] / drawn["decoding"] == pytest.approx(row["nodes_per_step"])
