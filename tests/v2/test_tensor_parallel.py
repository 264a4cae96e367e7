"""Two ranks: the tokens of stock vLLM on two ranks, with trees that the first rank drafts for both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.check import judged
from tests.v2 import two_ranks
from tests.v2.models import small_model

ROOT = Path(__file__).parents[2]


def _run(model: str, recorded: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.v2.two_ranks", model, str(recorded)],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT"))


def _answer(tokens: list[int]) -> Any:
    """As an engine returns it; only tokens are compared."""
    one = SimpleNamespace(index=0, token_ids=tokens, text="", finish_reason="length", stop_reason=None, logprobs=None)
    return SimpleNamespace(outputs=[one], prompt_logprobs=None)


@pytest.mark.nightly
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_two_ranks_verify_the_same_trees_and_yield_stocks_tokens(tmp_path: Path) -> None:
    model = small_model(tmp_path, "qwen3", "float32")
    stock, ours = _run(model, tmp_path / "answers.json")
    answers = ([_answer(tokens) for tokens in side["tokens"]] for side in (stock, ours))
    report = judged(model, "float32", two_ranks.requests(), *answers, **two_ranks.ENGINE)
    assert report.tokens == 4 * 7 and not report.failures, report.failures
    first, second = ours["stats"]
    for count in ("steps", "drafted", "accepted", "branches_committed"):
        assert first[count] == second[count] > 0, count
    assert first["shape"] == "tree"
    # one request has a grammar: the scheduler asked for its drafts across processes
    assert first["request_reasons"] == {
        "penalties count the rows before a row": 1,
        "structured outputs follow one line of tokens": 1,
    }
