"""A server of two data-parallel ranks: both draft, and answers are those without drafts."""

from __future__ import annotations

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.integration.serving import serve

CHECKPOINT = Path(__file__).parents[2] / "bench" / "policy" / "checkpoint"


@pytest.mark.nightly
def test_both_ranks_draft_and_answer_as_without_drafts(tmp_path: Path) -> None:
    flags = ("--data-parallel-size", "2", "--spec-rollout.budget", "fixed", "--max-model-len", "512")
    with serve(str(CHECKPOINT), tmp_path / "serve.log", *flags, "--dtype", "float32") as address:

        def complete(seed: int, is_on: bool) -> Any:
            body = {"model": "tiny", "prompt": "17 + 45 - 8", "seed": seed, "max_tokens": 90, "logprobs": 1}
            body["vllm_xargs"] = {"spec_rollout": json.dumps({"enabled": is_on})}
            header = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), header)
            with urllib.request.urlopen(request, timeout=120) as answer:
                (choice,) = json.load(answer)["choices"]
            return choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]

        with ThreadPoolExecutor(8) as pool:
            drafted, plain = ([*pool.map(complete, range(16), [is_on] * 16)] for is_on in (True, False))
        metrics = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
    assert drafted == plain
    counted = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
    accepted = {re.search(r'engine="(\d+)"', line)[1]: float(line.split()[-1]) for line in counted}
    assert accepted.keys() == {"0", "1"} and min(accepted.values()) > 0, accepted
