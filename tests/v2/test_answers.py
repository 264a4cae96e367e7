"""Every field of an answer is stock's, with branches accepted: experts, masks, logprobs, versions, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import LLM

from tests.e2e.identity.cases import Case
from tests.e2e.identity.check import VOCAB, fuzz
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import Engine, engine
from tests.e2e.identity.fields import differences, metrics_are_the_workers, undecided
from tests.v2.models import small_experts
from vllm_specrollout.types import DraftMode

OPTIONS: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 6,
    # prompts come in pieces, beside requests that draft
    "max_num_batched_tokens": 48,
    "disable_log_stats": False,
    "enable_return_routed_experts": True,
    "return_sampling_mask": True,
    "logprobs_mode": "processed_logprobs",
}
DRAFTS = {"max_draft_tokens": 8, "max_depth": 6}
SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_k": 12, "ignore_eos": True, "max_tokens": 12}
CASES = [
    Case("drawn", str(i), [(7 * i + 5 * j) % VOCAB for j in range(length)], {**SAMPLING, **more, "seed": i})
    for i, (length, more) in enumerate(
        [
            (5, {}),
            (40, {"top_p": 0.9, "logprobs": 3}),
            (70, {"min_p": 0.02}),
            (9, {"prompt_logprobs": 2, "logprobs": 0}),
            (6, {"prompt_logprob_token_ids": [[5, 6]] * 5, "frequency_penalty": 0.4}),
            (33, {"routed_experts_prompt_start": 20, "stop_token_ids": list(range(20, 26))}),
        ]
    )
]
# of a prompt that is asked for again, more is cached
CACHED = ("num_cached_tokens", "num_cache_creation_tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_experts(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def stock(model: str) -> list[Any]:
    """Stock's answers."""
    with engine(model, "float32", is_ours=False, **OPTIONS) as one:
        return answers(one.llm)


def answers(llm: LLM, weights: str = "7") -> list[Any]:
    llm.llm_engine.set_weight_version(weights)
    return run(llm, CASES)


def draft(ours: Engine, stock: Sequence[Any]) -> None:
    known = {case.problem_id: list(one.outputs[0].token_ids) for case, one in zip(CASES, stock, strict=True)}
    fuzz(ours, known, 0, 0.9)


def test_an_accepted_branch_returns_its_own_experts_and_masks_and_all_else_of_stocks_answer(
    model: str, stock: list[Any]
) -> None:
    assert not undecided()
    options = {**OPTIONS, "per_request_spec_decode_metrics": "detailed"}
    with engine(model, "float32", is_ours=True, spec_rollout=DRAFTS, **options) as ours:
        draft(ours, stock)
        got = answers(ours.llm)
        stats = ours.llm.collective_rpc("spec_rollout_stats", args=(True,))[0]
        assert stats["branches_committed"] > 0 and stats["accepted"] > 0
        assert not list(differences(stock, got))
        for one in got:
            output = one.outputs[0]
            assert len(output.sampling_mask.token_ids) == len(output.token_ids)
            assert output.routed_experts is not None and output.weight_versions
        metrics_are_the_workers(got, stats, DRAFTS["max_draft_tokens"])

        ours.runner.shape = (DraftMode.CHAIN, "they follow one line now")
        draft(ours, stock)
        again = answers(ours.llm)
        stats = ours.llm.collective_rpc("spec_rollout_stats")[0]
        assert stats["branches_committed"] == 0 < stats["accepted"]
        assert not list(differences(stock, again, left_out=(*CACHED, "request_id")))


def test_drafts_made_after_scheduling_ahead_return_stocks_experts_and_masks(
    model: str, stock: list[Any], ahead: None
) -> None:
    with engine(model, "float32", is_ours=True, spec_rollout=DRAFTS, **OPTIONS) as ours:
        assert ours.llm.llm_engine.engine_core.engine_core.batch_queue is not None
        draft(ours, stock)
        got = answers(ours.llm)
        assert ours.runner.stats.branches_committed > 0 and ours.runner.stats.accepted > 0
        assert not list(differences(stock, got))
