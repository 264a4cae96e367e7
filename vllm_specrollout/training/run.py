"""Trains a head on a buffer: one optimiser step per batch, resumable, with a held-out part to judge by.

What belongs here: the run, and what can be set for it. Its `TrainConfig` alone says what comes of it: the same command
gives the same head. It keeps its state beside the head, and goes on from there when started again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch.utils.data import DataLoader

from vllm_specrollout.config.checks import Choice, Range, check_fields
from vllm_specrollout.errors import ConfigError, UnsupportedError

from .buffer import Batch, Buffer, batch_of, packed
from .heads import EagleHead, load_eagle, load_head, new_eagle, new_head, save_eagle, save_head

STATE, METRICS = "training.pt", "training.jsonl"
_FORMAT = 2  # of the state
_HELD_OUT = 20  # every such example judges, and trains nothing
METHODS = ("eagle3", "eagle")
LOSSES = ("kl_div", "ce", "tv", "lk_hybrid")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """All that a run depends on, beside what the buffer holds."""

    method: Annotated[str, Choice(METHODS)] = "eagle3"
    """`eagle3` (a head over several layers' hidden states, with an output head of its own) or `eagle` (over the last
    one's, with the target's output head)."""
    epochs: Annotated[int, Range(1, 1000)] = 1
    """Passes over the buffer."""
    batch_tokens: Annotated[int, Range(16, 1 << 20)] = 2048
    """Tokens per optimiser step."""
    learning_rate: Annotated[float, Range(1e-9, 1.0)] = 1e-3
    """The highest one; it rises over the first steps and falls to a tenth along a cosine."""
    weight_decay: Annotated[float, Range(0.0, 10.0)] = 0.01
    clip: Annotated[float, Range(1e-6, 1e6)] = 1.0
    """Gradient norm above which the gradient is scaled down."""
    num_levels: Annotated[int, Range(1, 16)] = 4
    """Tokens ahead that the head is trained for, on its own drafts' hidden states (training-time test)."""
    level_decay: Annotated[float, Range(0.0, 1.0)] = 0.9
    """Weight of a level's loss relative to the one before it."""
    loss: Annotated[str, Choice(LOSSES)] = "kl_div"
    """`kl_div` (cross-entropy with the target's probabilities), `ce` (with its likeliest token), `tv` (what rejection
    sampling would refuse), `lk_hybrid` (between the first and the third)."""
    feature_weight: Annotated[float, Range(0.0, 1000.0)] = 0.1
    """`eagle` only: weight of the distance to the target's hidden states."""
    draft_vocab: Annotated[int, Range(0, 1 << 24)] = 0
    """`eagle3` only: tokens that the head may draft, the most frequent ones; 0: all."""
    dtype: Annotated[str, Choice(("auto", *DTYPES))] = "auto"
    """Of the products: `bfloat16`, `float32`, or `auto`: bfloat16 where the hardware has units for it."""
    save_every: Annotated[int, Range(1, 1 << 30)] = 200
    """Steps between two saved states."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.method != "eagle3" and self.draft_vocab:
            raise ConfigError(
                f"`draft_vocab` is {self.draft_vocab}, and an `{self.method}` head has its target's output head",
                "leave `draft_vocab` out, or train an `eagle3` head",
            )

    def rate_at(self, step: int, num_steps: int) -> float:
        """Learning rate of step `step`, from 0."""
        warm = max(1, min(100, num_steps // 10))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        progress = (step - warm) / max(1, num_steps - warm)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass(frozen=True, slots=True)
class Measured:
    """How good a head is on some examples, drafting greedily."""

    # nats per token, all levels, weighted
    loss: float
    # [levels] share of the places where the drafts of levels 1 to k are all what the target finds likeliest
    agreement: tuple[float, ...]

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step would yield at temperature 0: the target's own, and the drafts before the first miss."""
        return 1.0 + sum(self.agreement)

    @property
    def is_useful(self) -> bool:
        """Whether at least a quarter of the drafts would be accepted. Each level costs a pass of the head."""
        return 4 * sum(self.agreement) >= len(self.agreement)


class TrainingRun:
    """One run.

    Args:
        target: the target's folder.
        data: the buffer's folder.
        out: the head's folder; the run's state is kept there too.
        start: a head to train further; None: a new one.
        newest_only: leave out what older weights of the target computed.

    Raises:
        ConfigError, UnsupportedError: see `Buffer`, `new_head`, `load_head`; or `out` holds the state of another run.
    """

    def __init__(
        self,
        target: Path,
        data: Path,
        out: Path,
        config: TrainConfig,
        *,
        start: Path | None = None,
        newest_only: bool = False,
    ) -> None:
        self.config, self.out = config, out
        self.buffer = Buffer(data, newest_only=newest_only)
        self._about = {**asdict(config), "start": str(start or ""), "data": str(data), "format": _FORMAT}
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = DTYPES[_dtype(self.device) if config.dtype == "auto" else config.dtype]
        if state := self._state():
            # a rollout may go on, and the run's batches are of the answers that there were at its beginning
            self.buffer.restrict(state["places"])
        torch.manual_seed(config.seed)
        self.head = self._head(target, start).to(self.device).train()
        indices = range(len(self.buffer))
        self.held_out = [i for i in indices if i % _HELD_OUT == _HELD_OUT - 1]
        self.trained_on = [i for i in indices if i % _HELD_OUT != _HELD_OUT - 1]
        if not self.held_out:
            raise UnsupportedError(
                f"`{data}` holds {len(self.buffer)} answers, at least {_HELD_OUT} are needed",
                "collect more answers first",
            )
        orders = (torch.Generator().manual_seed(config.seed * 1000 + epoch) for epoch in range(config.epochs))
        self._batches = [batch for order in orders for batch in self._packed(self.trained_on, order)]
        weights = [one for one in self.head.parameters() if one.requires_grad]
        self._optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=config.weight_decay)
        self.step = 0
        if state:
            self.head.load_state_dict(state["head"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step = int(state["step"])

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return len(self._batches)

    def train(self, on_step: Callable[[int, float], None] = lambda step, loss: None) -> Measured:
        """Run to the end, and save the head. Returns what the held-out answers say.

        Args:
            on_step: told the number of each step done, and its loss.
        """
        begin = time.perf_counter()
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / METRICS).open("a", encoding="utf-8") as metrics:
            for batch in self._loaded(self._batches[self.step :]):
                if batch is None:
                    self.step += 1
                    continue
                loss, agreement = self._train_on(batch)
                self.step += 1
                on_step(self.step, loss)
                if self.step % 10 == 0 or self.step == self.num_steps:
                    line = {
                        "step": self.step,
                        "loss": round(loss, 4),
                        "agreement": [round(one, 4) for one in agreement],
                    }
                    line["seconds"] = round(time.perf_counter() - begin, 1)
                    metrics.write(json.dumps(line) + "\n")
                    metrics.flush()
                if self.step % self.config.save_every == 0 and self.step < self.num_steps:
                    self._save_state()
        found = self.measure()
        save = save_eagle if isinstance(self.head, EagleHead) else save_head
        save(self.head, self.out, self._saved_dtype())
        self._save_state()
        return found

    @torch.no_grad()
    def measure(self) -> Measured:
        """What the head is worth on the answers that it was not trained on.

        Raises:
            UnsupportedError: all of them were evicted.
        """
        self.head.eval()
        losses, agreements, weights = [], [], []
        for batch in filter(None, self._loaded(self._packed(self.held_out))):
            loss, agreement = self._forward(batch)
            losses.append(float(loss))
            agreements.append(agreement)
            weights.append(int(batch.loss_mask.sum()))
        self.head.train()
        if not weights:
            raise UnsupportedError(
                f"all {len(self.held_out)} answers held out of the run were evicted from the buffer while it trained",
                "give the rollout a larger `collect.max_tokens`, or train when it is over",
            )
        share = torch.tensor(weights, dtype=torch.float64) / max(sum(weights), 1)
        levels = (torch.tensor(agreements, dtype=torch.float64) * share[:, None]).sum(dim=0)
        return Measured(float((torch.tensor(losses, dtype=torch.float64) * share).sum()), tuple(levels.tolist()))

    # --- one step ----------------------------------------------------------------------------------------------------

    def _train_on(self, batch: Batch) -> tuple[float, list[float]]:
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.rate_at(self.step, self.num_steps)
        loss, agreement = self._forward(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.config.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()), agreement

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, list[float]]:
        """The loss, and the share of places where levels 1 to k agree with the target's likeliest tokens."""
        from speculators.losses import resolve_loss_config

        columns = batch.to(self.device, torch.float32)
        name = "last_before" if self.config.method == "eagle" else "hidden_states"
        implementation = "fused" if self.device.type == "cuda" else "eager"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            _, loss, metrics = self.head(
                hidden_states=columns[name],
                input_ids=columns["input_ids"],
                document_ids=columns["document_ids"],
                loss_mask=columns["loss_mask"],
                position_ids=columns["position_ids"],
                verifier_last_hidden_states=columns["last_hidden"],
                ttt_steps=self.config.num_levels,
                ttt_step_loss_decay=self.config.level_decay,
                loss_config=resolve_loss_config(self.config.loss, implementation),
            )
        levels = range(self.config.num_levels)
        sums = [float(metrics[f"full_acc_{level}_sum"]) for level in levels]
        totals = [max(float(metrics[f"full_acc_{level}_total"]), 1.0) for level in levels]
        return loss, [one / total for one, total in zip(sums, totals, strict=True)]

    # --- what it is fed with -----------------------------------------------------------------------------------------

    def _packed(self, indices: Sequence[int], order: torch.Generator | None = None) -> list[list[int]]:
        """The examples of each batch, in a random order if one is given."""
        lengths = [self.buffer.length(i) for i in indices]
        return [[indices[i] for i in group] for group in packed(lengths, self.config.batch_tokens, order)]

    def _loaded(self, batches: list[list[int]]) -> Iterable[Batch | None]:
        """The batches, without answers that were evicted; None: nothing is left of one."""
        collate = partial(batch_of, num_levels=self.config.num_levels, most_tokens=self.config.batch_tokens)
        return DataLoader(self.buffer, batch_sampler=batches, collate_fn=collate)

    def _head(self, target: Path, start: Path | None) -> Any:
        """A new one, or that in the folder `start`."""
        config, source = self.config, self.buffer.source
        if config.method == "eagle":
            weight = config.feature_weight
            return new_eagle(target, source, weight) if start is None else load_eagle(start, target, source, weight)
        if start is None:
            return new_head(target, source, config.num_levels, self._draft_vocab())
        return load_head(start, source)

    def _draft_vocab(self) -> list[int] | None:
        if not self.config.draft_vocab:
            return None
        counts: dict[int, int] = {}
        for example in self.buffer:
            for token in example.token_ids[example.num_prompt :].tolist():
                counts[token] = counts.get(token, 0) + 1
        # what was never sampled comes last, in the order of the ids
        most = sorted(range(max(counts) + 1), key=lambda token: -counts.get(token, 0))[: self.config.draft_vocab]
        return sorted(most)

    # --- state -------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """The saved one, empty if there is none. Raises: ConfigError, it is another run's."""
        path = self.out / STATE
        if not path.exists():
            return {}
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location=self.device)
        if state["about"] != self._about:
            changed = [name for name in self._about if state["about"].get(name) != self._about[name]]
            raise ConfigError(
                f"`{path}` is of another run: {', '.join(changed)} differ",
                "choose another --out, or delete that file to begin anew",
            )
        return state

    def _save_state(self) -> None:
        state = {"about": self._about, "step": self.step, "places": self.buffer.places()}
        state |= {"head": self.head.state_dict(), "optimizer": self._optimizer.state_dict()}
        partial = self.out / f"{STATE}.partial"
        torch.save(state, partial)
        # in one move, so that a run killed meanwhile leaves a whole one
        partial.replace(self.out / STATE)

    def _saved_dtype(self) -> torch.dtype:
        """That of the target's checkpoint; the engine that collected may have run it in another."""
        config = getattr(self.head.config, "transformer_layer_config", self.head.config)
        dtype = getattr(config, "dtype", None) or next(iter(self.buffer)).hidden.dtype
        return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _dtype(device: torch.device) -> str:
    if device.type == "cuda":
        return "bfloat16"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
