"""Makes a draft model for the policy: a smaller one that learns the policy's own distributions, from its rollouts.

The buffer (`collect.dir` of an engine) holds what the policy's output head took in at each token of its answers, and so
the distribution it drew from. The draft model learns these, which suits drafting better than demonstrations do: it is
asked what the policy would say, slips included.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_specrollout.training.buffer import Buffer, Example

from .grpo import check_least, packed
from .random_model import model_config, shape_of_size
from .tokenizer import build_tokenizer
from .train import rate_at

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DistilConfig:
    """All that a run depends on, beside the buffer."""

    seed: int = 0
    # Passes over the buffer.
    epochs: int = 10
    # Padded tokens per optimiser step.
    batch_tokens: int = 4096
    # A name in SHAPES, and how many of its layers.
    size: str = "1M"
    num_layers: int = 4
    # The highest one; a cosine leads down to a hundredth of it.
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        check_least(self, 1, "epochs", "batch_tokens", "num_layers", "warmup_steps")


def distil(
    config: DistilConfig, policy: Path, data: Path, out: Path, on_step: Callable[[int, int, float], None]
) -> dict[str, float]:
    """Writes a draft model (bf16) and the policy's tokenizer into `out`.

    Args:
        policy: its checkpoint, for the output head.
        data: the buffer's folder.
        on_step: told step, number of steps, and the loss: KL divergence in nats per answer token.

    Returns:
        what the last steps' losses were on average, and the number of parameters.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

    torch.manual_seed(config.seed)
    buffer, tokenizer = Buffer(data), build_tokenizer()
    head = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).lm_head
    shape = shape_of_size(config.size, num_layers=config.num_layers)
    model = Qwen3ForCausalLM(model_config("qwen3", shape, len(tokenizer))).train()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.98))
    batches = list(_batches(config, buffer))
    losses: list[float] = []
    for step, indices in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, len(batches), config.warmup_steps, config.learning_rate)
        loss = _loss(model, head, [buffer[i] for i in indices])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        on_step(step + 1, len(batches), losses[-1])
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    last = losses[-max(1, len(losses) // 20) :]
    return {"loss": sum(last) / len(last), "parameters": sum(weight.numel() for weight in weights)}


def _batches(config: DistilConfig, buffer: Buffer) -> Iterator[list[int]]:
    """Answers of similar length share a batch, so little of it is padding."""
    groups = packed(range(len(buffer)), buffer.length, config.batch_tokens)
    for epoch in range(config.epochs):
        random.Random(f"distil/{config.seed}/{epoch}").shuffle(groups)
        yield from groups


def _loss(model: "torch.nn.Module", head: "torch.nn.Module", examples: Sequence[Example]) -> "torch.Tensor":
    """KL(policy || draft model), nats per answer token; padded on the right, which causal attention keeps out."""
    import torch

    pad = torch.nn.utils.rnn.pad_sequence
    token_ids = pad([one.token_ids.long() for one in examples], batch_first=True)
    # each place asks for the next token, from the one that the prompt's last token asks for
    counts = pad([torch.arange(len(one)) >= one.num_prompt - 1 for one in examples], batch_first=True)
    wanted = torch.cat([one.last_hidden[max(one.num_prompt - 1, 0) :] for one in examples]).float()
    with torch.no_grad():
        target = head(wanted).log_softmax(dim=-1)
    drafted = model(input_ids=token_ids, use_cache=False).logits[counts].log_softmax(dim=-1)
    return torch.nn.functional.kl_div(drafted, target, reduction="batchmean", log_target=True)
