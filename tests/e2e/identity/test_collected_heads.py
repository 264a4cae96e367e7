"""From rollout to head and back: what engines collect, and that a head trained on it drafts in vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("speculators")

import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from bench.policy import CHECKPOINT
from bench.policy.reward import problems
from bench.policy.tokenizer import prompt_text
from tests.e2e.drafting_models import eagle3_head, eagle_head
from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB, check_identity
from tests.e2e.identity.compare import run
from tests.e2e.identity.engines import engine, model
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.training.buffer import Buffer, paths_in
from vllm_specrollout.training.run import TrainConfig, TrainingRun


def collected(target: str, folder: Path, **spec_rollout: Any) -> tuple[Buffer, list[list[int]]]:
    """What an engine keeps of some requests that share prompts, and their tokens."""
    requests = cases(14, VOCAB, seed=31, max_tokens=30, only=("temperature 1", "greedy", "top_p", "n 3"))
    own = {"collect": {"dir": str(folder)}, **spec_rollout}
    with engine(target, "float32", is_ours=True, spec_rollout=own) as ours:
        outputs = run(ours.llm, requests)
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
        assert stats["accepted"] > 0
        ours.llm.collective_rpc("shutdown")
    tokens = [
        [*out.prompt_token_ids, *one.token_ids] for out in outputs for one in out.outputs if len(one.token_ids) > 1
    ]
    return Buffer(folder), tokens


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="history alone"),
        pytest.param({"eagle": True}, id="beside an EAGLE head", marks=pytest.mark.nightly),
    ],
)
def test_what_is_collected_is_what_the_target_computes_for_the_answer(
    models: Path, tmp_path: Path, given: dict
) -> None:
    target = model(models, "llama", "float32")
    own: dict[str, Any] = {}
    if given:
        head = {"method": "eagle", "model": eagle_head(target, tmp_path / "head"), "num_speculative_tokens": 3}
        own = {"speculative_config": head, "drafters": []}
    buffer, answers = collected(target, tmp_path / "data", **own)
    # an answer of one token has no row of its own
    assert buffer.source.target == target and len(buffer) == len(answers)
    reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    whole = {tuple(tokens[-20:]): tokens for tokens in answers}
    for example in buffer:
        # the last token was sampled and never computed
        (tokens,) = [t for tail, t in whole.items() if list(tail[:-1]) == example.token_ids[-19:].tolist()]
        begin = len(tokens) - 1 - len(example)
        assert begin >= 0 and example.token_ids.tolist() == tokens[begin:-1]
        with torch.no_grad():
            out = reference.model(torch.tensor(tokens[:-1])[None], output_hidden_states=True)
        layers = torch.cat([out.hidden_states[layer][0, begin:] for layer in buffer.source.layers], dim=-1)
        torch.testing.assert_close(example.hidden, layers, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(example.last_hidden, out.last_hidden_state[0, begin:], rtol=1e-3, atol=1e-3)


def test_only_as_much_is_kept_as_was_asked_for(models: Path, tmp_path: Path) -> None:
    target = model(models, "llama", "float32")
    buffer, answers = collected(target, tmp_path, collect={"dir": str(tmp_path), "max_answer_tokens": 24, "share": 0.5})
    assert 0 < len(buffer) < len(answers)
    assert max(len(example) for example in buffer) <= 24


def test_a_buffer_that_cannot_be_written_costs_the_buffer_and_no_tokens(models: Path, tmp_path: Path) -> None:
    target = model(models, "llama", "float32")
    requests = cases(6, VOCAB, seed=32, max_tokens=20)

    with engine(target, "float32", is_ours=True, spec_rollout={"collect": {"dir": str(tmp_path)}}) as ours:
        plain = run(ours.llm, requests, enabled=False)
        ours.runner.spec_rollout.guard.is_strict = False

        def fails(*args: object) -> None:
            raise OSError("no space left")

        ours.runner.collector.feed = fails
        drafted = run(ours.llm, requests)
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    assert stats["failures"]["collecting"] > 0 and stats["accepted"] > 0
    assert [list(o.outputs[0].token_ids) for o in drafted] == [list(o.outputs[0].token_ids) for o in plain]


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_a_head_trained_on_what_was_collected_drafts_and_the_tokens_are_stocks(tmp_path: Path, method: str) -> None:
    """The project's policy: a random model's answers are not to be learned from a few of them."""
    target, data, head = str(CHECKPOINT), tmp_path / "data", tmp_path / "head"
    chosen = problems(128, seed=3, split="train")
    params = [SamplingParams(temperature=0, max_tokens=64) for _ in chosen]
    with engine(target, "float32", is_ours=True, spec_rollout={"collect": {"dir": str(data)}}) as ours:
        tokenizer = ours.llm.get_tokenizer()
        encoded = [tokenizer.encode(prompt_text(one.prompt), add_special_tokens=False) for one in chosen]
        prompts = [{"prompt_token_ids": ids} for ids in encoded]
        ours.llm.generate(prompts, params, use_tqdm=False)
        ours.llm.collective_rpc("shutdown")
    config = TrainConfig(method=method, epochs=6, batch_tokens=512, learning_rate=3e-3, num_levels=3, dtype="float32")
    run_ = TrainingRun(Path(target), data, head, config)
    before = run_.measure()
    after = run_.train()
    assert after.tokens_per_step > before.tokens_per_step + 0.3

    given = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    own = {"drafters": [], "budget": "fixed", "max_draft_tokens": 6, "speculative_config": given}
    requests = cases(12, VOCAB, seed=33, max_tokens=24)
    check_identity(target, "float32", requests, num_drafters=0, spec_rollout=own)
    with engine(target, "float32", is_ours=True, spec_rollout={**own, "shape": "chain"}) as ours:
        ours.llm.generate(prompts[:20], params[:20], use_tqdm=False)
        (stats,) = ours.llm.collective_rpc("spec_rollout_stats")
    # the engine drafts as well as the training said of answers that it was not trained on
    assert 1.0 + stats["accepted"] / stats["request_steps"] > after.tokens_per_step - 0.3


def test_layers_that_the_head_in_use_does_not_take_are_refused(models: Path, tmp_path: Path) -> None:
    target = model(models, "llama", "float32")
    given = {"method": "eagle3", "model": eagle3_head(target, tmp_path / "head"), "num_speculative_tokens": 2}
    own = {"speculative_config": given, "collect": {"dir": str(tmp_path / "data"), "layers": [2, 4]}}
    with (
        pytest.raises(ConfigError, match=r"`collect.layers` is \[2, 4\], and the head in use takes layers \[1, 2, 3\]"),
        engine(target, "float32", is_ours=True, spec_rollout=own),
    ):
        pass
    assert paths_in(tmp_path / "data") == []
