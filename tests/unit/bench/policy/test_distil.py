"""A draft model learns the policy's own distributions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from bench.policy.random_model import make_random_model
from bench.policy.train import DistilConfig, _divergence, distil
from vllm_specrollout.training.answers import KeptAnswer


class Fixed(torch.nn.Module):
    """In the place of a model: answers with given logits, whatever it reads."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self._given = logits

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Fixed:
        self.logits = self._given[: input_ids.shape[0], : input_ids.shape[1]]
        return self


def answer(length: int, prompt_tokens: int, vocab: int = 64) -> KeptAnswer:
    return KeptAnswer(np.random.default_rng(length).integers(vocab, size=length).astype(np.int32), prompt_tokens, 0)


def test_the_loss_is_the_divergence_over_the_tokens_of_answers_alone() -> None:
    """Prompts, padding and what follows an answer are huge here: whoever counted them would be far off."""
    torch.manual_seed(0)
    answers = [answer(7, 3), answer(4, 2)]
    ours, theirs = torch.full((2, 7, 5), 1e6), torch.full((2, 7, 5), 1e6)
    theirs[..., 0] = -1e6
    wanted, count = 0.0, 0
    for row, one in enumerate(answers):
        for place in range(one.prompt_tokens - 1, len(one.token_ids) - 1):
            ours[row, place], theirs[row, place] = torch.randn(5), torch.randn(5)
            p, q = theirs[row, place].log_softmax(dim=-1), ours[row, place].log_softmax(dim=-1)
            wanted += float((p.exp() * (p - q)).sum())
            count += 1
    assert float(_divergence(Fixed(ours), Fixed(theirs), answers)) == pytest.approx(wanted / count, rel=1e-5)


def test_a_draft_model_comes_closer_to_its_policy_and_can_be_read_back(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy, out, data = tmp_path / "policy", tmp_path / "draft", tmp_path / "answers.jsonl"
    make_random_model(policy, size="1M", num_layers=1)
    lines = [
        {"prompt_token_ids": one[:4], "token_ids": one[4:]}
        for one in (answer(n, 4).token_ids.tolist() for n in (11, 12, 13, 14))
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    losses: list[float] = []
    config = DistilConfig(epochs=15, num_layers=1, warmup_steps=2, batch_tokens=64)
    facts = distil(config, policy, data, out, lambda step, total, loss: losses.append(loss))
    assert losses[-1] < losses[0] * 0.9
    drafted = AutoModelForCausalLM.from_pretrained(out)
    assert sum(weight.numel() for weight in drafted.parameters()) == facts["parameters"]
    assert (out / "tokenizer.json").is_file()
