"""Training of the small policy on demonstrations of the tasks, on CPU.

A run is set by its configuration alone: the same command gives the same data in the same order.

Demonstrations are drawn on the fly. Those of similar length share a batch, so little of it is padding, every answer
starts at position 0 of its own row, and no answer attends to another. (Packing several into one row would need a block
mask, slow on CPU.)
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from vllm_specrollout.config.checks import check_fields

from .grpo import LEAST_ONE, Tokens, answer_logits, packed
from .random_model import model_config, shape_of_size
from .reward import draw_problems
from .tasks import FAMILIES, demonstrate
from .tokenizer import END, build_tokenizer, prompt_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CLIP = 1.0
"""Gradient norm above which the gradient is scaled down."""
_POOL = 1024
"""Demonstrations drawn and sorted at a time."""
# From each share of the run on, the largest number of terms: short problems first, they teach the sums fastest.
_CURRICULUM = ((0.0, 8), (0.35, 16), (0.55, 64))
OnStep = Callable[[int, int, float], None]
"""Told steps done, number of steps, and a loss in nats per answer token."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All that a training run depends on."""

    seed: int = 0
    # Optimiser steps in all.
    steps: Annotated[int, LEAST_ONE] = 3600
    # Padded tokens per step, prompts included.
    batch_tokens: Annotated[int, LEAST_ONE] = 4096
    # A name in SHAPES.
    size: str = "3M"
    # Highest learning rate, reached after warmup_steps, then a cosine down to a hundredth.
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    # Torch threads.
    threads: Annotated[int, LEAST_ONE] = 2

    def __post_init__(self) -> None:
        check_fields(self)


def rate_at(step: int, steps: int, warmup: int, highest: float) -> float:
    """Learning rate of step `step` (from 0): up to the highest one, then a cosine down to a hundredth of it."""
    if step < warmup:
        return highest * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return highest * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(config: TrainConfig, out: Path, on_step: OnStep) -> dict[str, Any]:
    """Trains a policy, writes its checkpoint into `out`, and returns the run's facts for `training.json`."""
    import torch
    import transformers

    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    tokenizer = build_tokenizer()
    shape = shape_of_size(config.size)
    model = transformers.Qwen3ForCausalLM(model_config("qwen3", shape, len(tokenizer))).train()
    # norms are not decayed
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)

    recent, started = 0.0, time.perf_counter()
    stream = batches(tokenizer, seed=config.seed, steps=config.steps, tokens=config.batch_tokens)
    for step, rows in enumerate(stream):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, config.steps, config.warmup_steps, config.learning_rate)
        # products run in bf16, weights and optimiser stay in fp32
        with torch.autocast("cpu", torch.bfloat16):
            logits, targets = answer_logits(model, rows)
        loss = torch.nn.functional.cross_entropy(logits.float(), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        now = float(loss.detach())
        recent = 0.98 * recent + 0.02 * now if step else now
        on_step(step + 1, config.steps, recent)
    seconds = time.perf_counter() - started
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {
        "command": f"python -m {__package__} train --seed {config.seed} --steps {config.steps} --out DIR",
        "config": asdict(config),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "final_loss_nats_per_token": round(recent, 4),
        "train_seconds": round(seconds),
    }


def max_terms_at(progress: float) -> int:
    """The curriculum's limit when `progress` (0..1) of the run is done."""
    return [limit for start, limit in _CURRICULUM if progress >= start][-1]


def batches(tokenizer: "PreTrainedTokenizerFast", *, seed: int, steps: int, tokens: int) -> Iterator[list[Tokens]]:
    """`steps` batches of near `tokens` padded tokens; the same by seed."""
    done = 0
    while done < steps:
        rng = random.Random(f"demonstrations/{seed}/{done}")
        pool = _draw_pool(tokenizer, rng, max_terms_at(done / steps))
        groups = packed(pool, lambda row: len(row[0]) + len(row[1]), tokens)
        rng.shuffle(groups)
        yield from groups[: steps - done]
        done += len(groups)


def _draw_pool(tokenizer: "PreTrainedTokenizerFast", rng: random.Random, max_terms: int) -> list[Tokens]:
    """`_POOL` demonstrations, half of each family."""
    prompts, answers = [], []
    for family in FAMILIES:
        stream = draw_problems(rng, family, "train", "sft", max_terms=max_terms)
        for _ in range(_POOL // len(FAMILIES)):
            problem = next(stream)
            prompts.append(prompt_text(problem.prompt))
            answers.append(demonstrate(problem, rng) + END)
    return list(zip(tokenizer(prompts)["input_ids"], tokenizer(answers)["input_ids"], strict=True))
