"""The very tokens of stock vLLM where a model drafts on the V2 runner: vLLM's own speculators, sound and broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.e2e.drafting_models import drafting_with
from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB, check_identity
from tests.e2e.identity.engines import Engine, engine
from tests.v2.models import small_model as model
from tests.v2.test_identity import ENGINE, FEATURES

FIXED = {"drafters": [], "budget": "fixed", "max_draft_tokens": 6, "max_depth": 3}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def settings(kind: str, target: str, folder: Path, **more: Any) -> dict[str, Any]:
    given = {**drafting_with(kind, target, folder / "draft"), "num_speculative_tokens": 3}
    return {**FIXED, "speculative_config": given, **more}


def _asked_the_model(ours: Engine) -> None:
    assert ours.runner.model_drafter is not None and ours.runner.model_drafter._times > 0


@pytest.mark.parametrize("kind", ["draft_model", "eagle", "eagle3"])
@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_a_model_drafts_and_the_tokens_are_stocks(models: Path, tmp_path: Path, kind: str, shape: str) -> None:
    target = model(models, "llama", "float32") if kind != "eagle3" else deeper(models)
    requests = cases(10, VOCAB, seed=21, max_tokens=6, only=FEATURES)
    own = settings(kind, target, tmp_path, shape=shape)
    check_identity(
        target, "float32", requests, num_drafters=0, spec_rollout=own, inspect=_asked_the_model,
        must_accept=kind == "draft_model", **ENGINE
    )  # fmt: skip


def deeper(models: Path) -> str:
    """A target with as many layers as an EAGLE-3 head takes."""
    from bench.policy.random_model import make_random_model

    path = models / "deeper"
    if not path.exists():
        make_random_model(path, arch="llama", size="1M", num_layers=4, dtype="float32", seed=7)
    return str(path)


def test_a_copy_of_the_target_is_met_at_every_position_with_steps_scheduled_ahead(models: Path, ahead: None) -> None:
    """The same model, the same noise: whatever the temperature, each draft token is the target's own."""
    target = model(models, "llama", "float32")
    given = {"method": "draft_model", "model": target, "num_speculative_tokens": 4}
    own = {**FIXED, "max_depth": 4, "max_draft_tokens": 8, "speculative_config": given}
    with engine(target, "float32", is_ours=True, spec_rollout=own, **ENGINE) as ours:
        ours.runner.model_drafter.sharpness._hits[0] = 1e9  # plain coupling
        params = [
            SamplingParams(temperature=t, seed=i, max_tokens=11, ignore_eos=True) for i, t in enumerate((0, 1, 2))
        ]
        prompts = [{"prompt_token_ids": [9 + i, 40, 41, 42 + i]} for i in range(3)]
        ours.llm.generate(prompts, params, use_tqdm=False)
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    # one token comes from the prompt's step, five from each other one
    assert stats["accepted"] == 3 * 8
