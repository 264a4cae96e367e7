"""Every field of an answer is stock's on the V1 runner, with branches accepted; what became of drafts is beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import Case
from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine, model
from tests.e2e.identity.fields import differences, metrics_are_the_workers, undecided
from tests.e2e.identity.fuzz import FuzzDrafter

if TYPE_CHECKING:
    from vllm import LLM

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


def renamed(llm: LLM, case: Case) -> tuple[Any, int]:
    """The case's answer, and how many tokens it had when the weights got another name."""
    engine, output, length = llm.llm_engine, None, 0
    engine.add_request("renamed", case.asked, case.sampling())
    while engine.has_unfinished_requests():
        output = next((one.outputs[0] for one in engine.step()), output)
        if output is not None and len(output.token_ids) > 3 and not length:
            engine.set_weight_version("8")
            length = len(output.token_ids)
    return output, length


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
        # and one whose tokens came of two versions says which ones
        answer, length = renamed(ours.llm, CASES[0])
        assert ours.llm.collective_rpc("spec_rollout_stats")[0]["accepted"] > stats["accepted"]
    assert list(answer.token_ids) == known[CASES[0].problem_id]
    assert [(own.version, own.start, own.end) for own in answer.weight_versions] == [
        ("7", 0, length),
        ("8", length, 16),
    ]
    assert not list(differences(wanted, got))
    assert all(output.weight_versions for one in got for output in one.outputs)
    metrics_are_the_workers(got, stats, 8)
