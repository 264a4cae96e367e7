"""Supervised training of the small policy on demonstrations of the tasks, on CPU.

A run is set by its `TrainConfig` alone: the same command gives the same data in the same order. It saves its state
now and then, and goes on from there when started again with the same work folder. It may then be given another number
of steps, and goes on in that schedule; `training.json` lists each part of such a run.

Demonstrations are drawn on the fly. Those of similar length share a batch, so little of it is padding, every answer
starts at position 0 of its own row, and no answer attends to another. (Packing several into one row would need a block
mask, slow on CPU.)
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vllm_specrollout.errors import ConfigError

from .random_model import model_config, shape_of_size
from .reward import draw_problems
from .tasks import FAMILIES, demonstrate
from .tokenizer import END, build_tokenizer, prompt_text

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

Row = TypeVar("Row")
Tokens = tuple[Sequence[int], Sequence[int]]
"""Of a prompt, and of an answer with the end token."""
_POOL = 1024
"""Demonstrations drawn and sorted at a time."""
# From each share of the run on, the largest number of terms: short problems first, they teach the sums fastest.
_CURRICULUM = ((0.0, 8), (0.35, 16), (0.55, 64))


def check_least(config: object, least: int, *names: str) -> None:
    """Refuse fields below their least value.

    Raises:
        ConfigError: one is.
    """
    for name in names:
        if getattr(config, name) < least:
            raise ConfigError(f"{name} is {getattr(config, name)}, the least is {least}", f"give a larger {name}")


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
        check_least(self, 1, "steps", "batch_tokens", "threads", "save_every")

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
        for step, rows in enumerate(stream):
            if step < first:
                continue
            for group in optimizer.param_groups:
                group["lr"] = config.rate_at(step)
            loss = _step(model, optimizer, rows, config.clip)
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
                state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, work / "state.tmp")
                # in one move, so that a run killed meanwhile leaves a whole one
                (work / "state.tmp").replace(work / "state.pt")
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
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), fused=True)


def _step(model: "torch.nn.Module", optimizer: "torch.optim.Optimizer", rows: Sequence[Tokens], clip: float) -> float:
    """One optimiser step; returns the loss in nats per answer token.

    Products run in bf16, weights and optimiser stay in fp32.
    """
    import torch

    with torch.autocast("cpu", torch.bfloat16):
        logits, targets = answer_logits(model, rows)
    loss = torch.nn.functional.cross_entropy(logits.float(), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def answer_logits(model: "torch.nn.Module", rows: Sequence[Tokens]) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Logits [num_tokens, V] of all answer tokens of these rows, row after row, and the tokens, int64 [num_tokens].

    Rows are padded on the right, so causal attention alone keeps the padding out.
    """
    import torch

    wholes = [torch.tensor([*prompt, *answer]) for prompt, answer in rows]
    places = [torch.arange(len(whole)) >= len(prompt) for whole, (prompt, _) in zip(wholes, rows, strict=True)]
    ids, is_answer = (torch.nn.utils.rnn.pad_sequence(one, batch_first=True) for one in (wholes, places))
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return model.lm_head(hidden[is_answer[:, 1:]]), ids[is_answer]


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
        raise ConfigError(f"{path} was saved by a run with other settings", "choose another --work, or delete it")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    parts, step = state["parts"], state["step"]
    if parts[-1]["steps"] != config.steps:
        parts = [*parts, {"steps": config.steps, "from_step": step}]
    return parts, step, state["seconds"]


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


def packed(rows: Iterable[Row], length: Callable[[Row], int], tokens: int) -> list[list[Row]]:
    """The rows by length, cut into batches of at most `tokens` padded tokens (one row at least)."""
    groups: list[list[Row]] = []
    for row in sorted(rows, key=length):
        if groups and length(row) * (len(groups[-1]) + 1) <= tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
