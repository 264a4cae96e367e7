"""`specrollout try` as its user runs it: ours, then stock, the page at the end, and a forecast of the same answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_specrollout.bench.policy import CHECKPOINT
from vllm_specrollout.bench.policy.reward import problems

from bench.scenarios.trial import ANSWERS, STEPS
from tests.unit.report.pages import islands
from vllm_specrollout.config import parse
from vllm_specrollout.replay.dump import read_dump
from vllm_specrollout.replay.forecast import forecast, step_times

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run: its rows, its page, and what it kept. The budget looks at no clock."""
    folder = tmp_path_factory.mktemp("try")
    asked = [{"prompt": [{"role": "user", "content": one.prompt}]} for one in problems(4, 0)]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(one) + "\n" for one in asked), encoding="utf-8")
    sizes = ["--samples", "2", "--batch", "8", "--max-tokens", "96", "--eager", "--kv-gib", "1", "--dtype", "float32"]
    done = subprocess.run(
        [Path(sys.executable).with_name("specrollout"), "try", str(CHECKPOINT), "--prompts", str(prompts), *sizes,
         "--spec-rollout", '{"budget": "fixed"}', "--report", str(folder / "try.html"),
         "--out", str(folder / "try.json"), "--keep", str(folder / "kept")],
        capture_output=True, text=True, timeout=600, cwd=folder, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (folder / "stdout").write_text(done.stdout, encoding="utf-8")
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "try.json").read_text(encoding="utf-8"))["rows"]


def test_a_users_model_and_prompts_are_tried_in_one_command(tried: Path) -> None:
    lines = [line for line in (tried / "stdout").read_text(encoding="utf-8").splitlines() if "stock vLLM" in line]
    assert lines[0].startswith(("the very tokens of stock vLLM: ", "stock vLLM's tokens, but for "))
    rows = rows_of(tried)
    assert [row["name"] for row in rows] == ["epoch 1", "epoch 2"]
    assert all(row["tokens_per_step"] > 1.0 for row in rows), "drafts were accepted"
    # the warm-up, and the epochs
    *_, first, second = islands((tried / "try.html").read_text(encoding="utf-8"))["summary"]["rollouts"]
    for row, drawn in zip(rows, (first, second), strict=True):
        assert (drawn["requests"], drawn["tokens"]) == (8, row["output_tokens"])
        assert drawn["verified"] / drawn["decoding"] == pytest.approx(row["nodes_per_step"])


def test_a_forecast_of_the_kept_answers_comes_near_what_was_measured(tried: Path) -> None:
    rollouts = read_dump(tried / "kept" / ANSWERS)
    found = forecast(rollouts, parse({"budget": "fixed"}), step_times(str(tried / "kept" / STEPS)), batch=8)
    for row, epoch in zip(rows_of(tried), found, strict=True):
        assert (epoch.num_answers, epoch.num_tokens) == (8, row["output_tokens"])
        assert epoch.plain_steps == pytest.approx(row["stock_steps"], abs=2)
        assert epoch.ours_steps == pytest.approx(row["steps"], rel=0.15)
        assert epoch.tokens_per_step == pytest.approx(row["tokens_per_step"], rel=0.15)
