"""A server of two data-parallel ranks drafts, and its answers are those without drafts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllm_specrollout.bench.policy import CHECKPOINT

from tests.integration.serving import ask, serve


@pytest.mark.nightly
def test_two_ranks_draft_and_answer_as_without_drafts(tmp_path: Path) -> None:
    flags = ("--data-parallel-size", "2", "--spec-rollout.budget", "fixed", "--max-model-len", "512")
    flags += ("--dtype", "float32", "--per-request-spec-decode-metrics", "summary")
    with serve(str(CHECKPOINT), tmp_path / "serve.log", *flags) as address:

        def complete(seed: int, is_on: bool) -> Any:
            body = {"model": "tiny", "prompt": "17 + 45 - 8", "seed": seed, "max_tokens": 90, "logprobs": 1}
            body["vllm_xargs"] = {"spec_rollout": json.dumps({"enabled": is_on})}
            _, found = ask(address, "/v1/completions", body)
            (choice,) = found["choices"]
            drafts = (found.get("metrics") or {}).get("speculative_decoding") or {}
            told = choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]
            return told, drafts.get("num_accepted_draft_tokens", 0)

        with ThreadPoolExecutor(8) as pool:
            drafted, plain = ([*pool.map(complete, range(16), [is_on] * 16)] for is_on in (True, False))
    assert [answer for answer, _ in drafted] == [answer for answer, _ in plain]
    assert sum(accepted for _, accepted in drafted) > 0 == sum(accepted for _, accepted in plain)
