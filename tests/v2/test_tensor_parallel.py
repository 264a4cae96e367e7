"""Two ranks: the tokens of stock vLLM on two ranks, with trees that the first rank drafts, alone or with a model."""

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

from tests.e2e.drafting_models import perturbed
from tests.e2e.identity.check import judged
from tests.v2 import two_ranks
from tests.v2.models import small_model

ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.v2.two_ranks", *arguments],
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
    drafter = perturbed(model, tmp_path / "drafter", 0.05)
    stock, by_oracle, by_model = _run(model, str(tmp_path / "answers.json"), drafter)
    truth = [_answer(tokens) for tokens in stock["tokens"]]
    for tokens in (by_oracle["tokens"], by_model["tokens"], by_model["tokens after"]):
        drafted = [_answer(own) for own in tokens]
        report = judged(model, "float32", two_ranks.requests(), truth, drafted, **two_ranks.ENGINE)
        assert report.tokens == 4 * 7 and not report.failures, report.failures
    for ours in (by_oracle, by_model):
        first, second = ours["stats"]
        for count in ("steps", "drafted", "accepted"):
            assert first[count] == second[count] > 0, count
        assert first["shape"] == "tree"
        # one request has a grammar: the scheduler asked for its drafts across processes
        assert first["request_reasons"] == {
            "penalties count the rows before a row": 1,
            "structured outputs follow one line of tokens": 1,
        }
    # what fails on the first rank costs drafts on both, and nobody waits for the other
    assert by_model["failures"][0] > 0 == by_model["failures"][1]
