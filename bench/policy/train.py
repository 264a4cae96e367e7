"""Supervised training of the small policy on demonstrations of the tasks, on CPU.

May enter: torch, transformers, this package. May not: vLLM (see `evaluate`).

A run is set by its `TrainConfig` alone: the same command gives the same data in the same order. It saves its state
now and then, and goes on from there when started again with the same work folder. It may then be given another number
of steps, and goes on in that schedule; `training.json` lists each part of such a run.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import PolicyError
from .random_model import model_config
from .shapes import shape_of_size
from .tokenizer import build_tokenizer
from .train_data import IGNORED, batches

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All that a training run depends on."""

    seed: int = 0
    # Optimiser steps in all.
    steps: int = 3600
    # Padded tokens per step, prompts included.
    batch_tokens: int = 4096
    # A name in SHAPES.
    size: str = "3M"
    # Highest learning rate, reached after warmup_steps, then a cosine down to a hundredth.
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    # Gradient norm above which the gradient is scaled down.
    clip: float = 1.0
    # Torch threads.
    threads: int = 2
    # Steps between two saved states.
    save_every: int = 400

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "threads", "save_every"):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name} is {getattr(self, name)}, the least is 1", hint=f"give a larger {name}")

    def rate_at(self, step: int) -> float:
        """Learning rate of step `step` (from 0)."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(config: TrainConfig, out: Path, work: Path, on_step: Callable[[int, float], None] | None = None) -> dict:
    """Trains a policy, writes its checkpoint into `out`, and returns the run's facts for `training.json`.

    `work` receives `metrics.jsonl` (step, loss in nats per answer token, tokens/s) and `state.pt`. `on_step` is told
    each step's number and loss.
    """
    import torch

    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model, optimizer = _build(config, len(tokenizer))
    parts, first, seconds = _resume(config, model, optimizer, work)
    recent = 0.0
    with (work / "metrics.jsonl").open("a") as metrics:
        started = time.perf_counter() - seconds
        stream = batches(tokenizer, seed=config.seed, steps=config.steps, tokens=config.batch_tokens)
        for step, (ids, labels) in enumerate(stream):
            if step < first:
                continue
            loss = _step(config, model, optimizer, step, ids, labels)
            recent = loss if step == first else 0.98 * recent + 0.02 * loss
            seconds = time.perf_counter() - started
            if on_step is not None:
                on_step(step, recent)
            if step % 20 == 0:
                line = {"step": step, "loss": loss, "smoothed": recent, "seconds": seconds}
                metrics.write(json.dumps({name: round(value, 5) for name, value in line.items()}) + "\n")
                metrics.flush()
            if (step + 1) % config.save_every == 0:
                state = {"config": asdict(config), "parts": parts, "step": step + 1, "seconds": seconds}
                _save_state(state, model, optimizer, work)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return _facts(config, model, parts, recent, seconds)


def _build(config: TrainConfig, vocab_size: int) -> tuple["torch.nn.Module", "torch.optim.Optimizer"]:
    """A fresh model (fp32) and AdamW; norms are not decayed."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM(model_config("qwen3", shape_of_size(config.size), vocab_size)).train()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), fused=True)


def _step(
    config: TrainConfig,
    model: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer",
    step: int,
    ids: "torch.Tensor",
    labels: "torch.Tensor",
) -> float:
    """One optimiser step on ids, labels [rows, length]; returns the loss in nats per answer token.

    Products run in bf16, weights and optimiser stay in fp32. Rows are padded on the right, so causal attention alone
    keeps the padding out.
    """
    import torch

    for group in optimizer.param_groups:
        group["lr"] = config.rate_at(step)
    targets = labels[:, 1:]
    keep = targets != IGNORED
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[keep])
    loss = torch.nn.functional.cross_entropy(logits.float(), targets[keep])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def _resume(
    config: TrainConfig, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer", work: Path
) -> tuple[list[dict], int, float]:
    """Loads a saved state, if there is one; returns the run's parts, the next step and the seconds spent so far.

    A part is {"steps": schedule it ran under, "from_step": its first step}; the last one is the coming one.
    """
    import torch

    path = work / "state.pt"
    if not path.exists():
        return [{"steps": config.steps, "from_step": 0}], 0, 0.0
    state = torch.load(path, weights_only=True)
    if state["config"] | {"steps": config.steps} != asdict(config):
        raise PolicyError(f"{path} was saved by a run with other settings", hint="choose another --work, or delete it")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    parts, step = state["parts"], state["step"]
    if parts[-1]["steps"] != config.steps:
        parts = [*parts, {"steps": config.steps, "from_step": step}]
    return parts, step, state["seconds"]


def _save_state(state: dict, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer", work: Path) -> None:
    """Replaces the saved state in one move, so that a run killed meanwhile leaves a whole one."""
    import torch

    torch.save(state | {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, work / "state.tmp")
    (work / "state.tmp").replace(work / "state.pt")


def _facts(config: TrainConfig, model: "torch.nn.Module", parts: list[dict], loss: float, seconds: float) -> dict:
    """What `training.json` says about the run itself."""
    import torch
    import transformers

    return {
        "command": f"python -m bench.policy train --seed {config.seed} --steps {config.steps} --out DIR",
        "config": asdict(config),
        "parts": parts,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "final_loss_nats_per_token": round(loss, 4),
        "train_seconds": round(seconds),
    }
