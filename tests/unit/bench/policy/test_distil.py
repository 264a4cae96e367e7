"""A draft model learns the policy's own distributions."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from bench.policy.random_model import make_random_model
from bench.policy.train import DistilConfig, _divergence, distil
from vllm_specrollout.training.buffer import Buffer, BufferWriter, Example, Source


class Fixed(torch.nn.Module):
    """In the place of a draft model: answers with given logits, whatever it reads."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self._given = logits

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Fixed:
        self.logits = self._given[: input_ids.shape[0], : input_ids.shape[1]]
        return self


def example(length: int, num_prompt: int, hidden: int, vocab: int = 64) -> Example:
    return Example(
        torch.randint(vocab, (length,)), torch.zeros(length, hidden), torch.randn(length, hidden), num_prompt, 0
    )


def test_the_loss_is_the_divergence_over_the_tokens_of_answers_alone() -> None:
    """Prompts and padding are huge here: whoever counted them would be far off."""
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 5, bias=False)
    examples = [example(7, 3, 8), example(4, 2, 8)]
    logits = torch.full((2, 7, 5), 1e6)
    wanted, count = 0.0, 0
    for row, one in enumerate(examples):
        for place in range(one.num_prompt - 1, len(one)):
            logits[row, place] = torch.randn(5)
            p = head(one.last_hidden[place]).log_softmax(dim=-1)
            wanted += float((p.exp() * (p - logits[row, place].log_softmax(dim=-1))).sum().detach())
            count += 1
    assert float(_divergence(Fixed(logits), head, examples)) == pytest.approx(wanted / count, rel=1e-5)


def test_a_draft_model_comes_closer_to_its_policy_and_can_be_read_back(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy, out = tmp_path / "policy", tmp_path / "draft"
    make_random_model(policy, size="1M", num_layers=1)
    hidden = AutoModelForCausalLM.from_pretrained(policy).config.hidden_size
    torch.manual_seed(0)
    writer = BufferWriter(tmp_path / "data", Source(str(policy), (1,), hidden), most_tokens=1000)
    for _ in range(4):
        writer.add(example(12, 4, hidden))
    writer.close()
    assert len(Buffer(tmp_path / "data")) == 4
    losses: list[float] = []
    config = DistilConfig(epochs=15, num_layers=1, warmup_steps=2, batch_tokens=64)
    facts = distil(config, policy, tmp_path / "data", out, lambda step, total, loss: losses.append(loss))
    assert losses[-1] < losses[0] * 0.9
    drafted = AutoModelForCausalLM.from_pretrained(out)
    assert sum(weight.numel() for weight in drafted.parameters()) == facts["parameters"]
    assert (out / "tokenizer.json").is_file()
