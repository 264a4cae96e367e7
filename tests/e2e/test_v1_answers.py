"""Every field of an answer is stock's on the V1 runner, with branches accepted; what became of drafts is beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import Case
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine, model
from tests.e2e.identity.fields import differences, metrics_are_the_workers, undecided
from tests.e2e.identity.fuzz import FuzzDrafter

CASES = [
    Case("drawn", str(i), [(7 * i + 5 * j) % VOCAB for j in range(length)], {"seed": i, "max_tokens": 16, **more})
    for i, (length, more) in enumerate(
        [
            (5, {"ignore_eos": True}),
            (40, {"logprobs": 3, "prompt_logprobs": 2, "ignore_eos": True}),
            (70, {"n": 2, "top_p": 0.9}),
            (6, {"temperature": 0.0, "frequency_penalty": 0.4, "stop_token_ids": list(range(20, 26))}),
        ]
    )
]


def test_every_field_of_an_answer_is_stocks(tmp_path: Path) -> None:
    assert not undecided()
    path = model(tmp_path, "qwen3", "float32")
    # of what is cached, whole blocks count, and ours are smaller by default
    with engine(path, "float32", is_ours=False, disable_log_stats=False, block_size=32) as stock:
        stock.llm.llm_engine.set_weight_version("7")
        wanted = run(stock.llm, CASES)
    options = {"disable_log_stats": False, "per_request_spec_decode_metrics": "detailed"}
    with engine(path, "float32", is_ours=True, spec_rollout={"max_draft_tokens": 8}, **options) as ours:
        ours.llm.llm_engine.set_weight_version("7")
        known = {case.problem_id: list(one.outputs[0].token_ids) for case, one in zip(CASES, wanted, strict=True)}
        ours.runner.spec_rollout.replace_drafters([FuzzDrafter(known, VOCAB, quality=0.9)])
        got = run(ours.llm, CASES)
        stats = ours.llm.collective_rpc("spec_rollout_stats")[0]
        assert stats["branches_committed"] > 0 and stats["accepted"] > 0
    assert not list(differences(wanted, got))
    assert all(output.weight_versions for one in got for output in one.outputs)
    metrics_are_the_workers(got, stats, 8)
