"""How often a model's drafts are the target's tokens, measured in the engine: figures that the coupling promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.e2e.drafting_models import perturbed
from tests.e2e.identity.engines import engine, model

OWN = {"drafters": [], "budget": "fixed", "max_draft_tokens": 4}


def measured(target: str, drafter: str, temperature: float, num_requests: int = 32) -> tuple[dict[str, Any], bool]:
    """The sums over positions; and whether the tokens were those without any drafter."""
    given = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 2}
    prompts = [{"prompt_token_ids": [5 + i, 50 + i, 90 + i]} for i in range(num_requests)]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=64, ignore_eos=True) for i in range(num_requests)
    ]
    settings, calls = {**OWN, "speculative_config": given}, "vllm_specrollout.bench.runner.tuning.Tuning"
    with engine(target, "float32", is_ours=True, spec_rollout=settings, worker_extension_cls=calls) as ours:
        ours.llm.collective_rpc("spec_rollout_matches", args=(True,))
        met = ours.llm.generate(prompts, params, use_tqdm=False)
        (sums,) = ours.llm.collective_rpc("spec_rollout_matches", args=(False,))
        for one in params:
            one.extra_args = {"spec_rollout": {"enabled": False}}
        plain = ours.llm.generate(prompts, params, use_tqdm=False)
        same = all(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(met, plain, strict=True))
    return sums, same


def test_a_copy_of_the_target_is_met_everywhere_by_shared_noise_and_by_greedy_drafts_sometimes(models: Path) -> None:
    target = model(models, "llama", "float32")
    sums, is_same = measured(target, target, temperature=1.0)
    # an answer's first token comes with its prompt, and for its last one nothing is drafted
    assert is_same and sums["positions"] == 32 * 62
    assert sums["first"]["shared"] == sums["positions"]
    assert sums["overlap"] == pytest.approx(sums["positions"], rel=1e-3)
    assert sums["first"]["greedy"] < 0.7 * sums["positions"]
    assert sums["sharpness"] == pytest.approx(1.0, abs=0.15), "that both count the same is learned"


def test_on_broad_distributions_a_comb_of_two_is_met_more_often_than_rejection_sampling_accepts(
    models: Path, tmp_path: Path
) -> None:
    """Rejection sampling accepts 1 - d (d: total variation distance), and yields other tokens than plain decoding."""
    target = model(models, "llama", "float32")
    sums, is_same = measured(target, perturbed(target, tmp_path / "draft", 0.11), temperature=1.0)
    assert sums["positions"] == 32 * 62
    accepted = sums["overlap"] / sums["positions"]
    shared, two = (sums[kind]["shared"] / sums["positions"] for kind in ("first", "best_two"))
    assert is_same and 0.6 < accepted < 0.8
    distance = 1.0 - accepted
    assert shared >= (1.0 - distance) / (1.0 + distance)
    assert two >= 1.12 * accepted
    assert two > sums["best_two"]["greedy"] / sums["positions"]
