"""A learner: keeps a head true to what its target says, one optimiser step after another, for as long as answers come.

What belongs here: the step, and how a head is judged. Which rows a step is of is the windows' matter. The optimiser's
state is kept when a head is published: begun anew, it makes a trained head worse for a hundred steps. A head is judged
by the tokens that a draft would have accepted under shared noise, in closed form, on answers that it never learned
from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch.nn import functional

from vllm_specrollout.config.checks import Choice, Range, check_fields

from .heads import EagleHead, drafted_tokens, logits_of, unrolled
from .match_rate import match_rate, match_rate_of
from .rows import Rows
from .windows import Window, WindowBatch, Windows, batch_of, whole

LOSSES = ("kl_div", "rkl", "ce", "tv", "lk_hybrid")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NEW_RATE, TRAINED_RATE = 1e-3, 3e-4
"""Learning rates: of a new head, and of one that was trained, which a higher one makes worse at first."""
_WARM = 20
SHARPNESS = (1.0, 2.0, 4.0, 8.0)
"""Of drafts, tried by a judgement: an engine learns it, and a head that is unsure while it learns needs another one."""
_JUDGED = 1024
"""Rows that are judged at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """All that a learner depends on, beside the answers."""

    rate: Annotated[float, Range(1e-9, 1.0)]
    """Learning rate; it rises over the first 20 steps, and stays."""
    num_levels: Annotated[int, Range(2, 16)] = 6
    """Tokens ahead that the head is trained for, on its own drafts' hidden states. With one, deep levels are lost."""
    width: Annotated[int, Range(64, 512)] = 64
    """Rows of a window, 16 rows of context included."""
    batch_rows: Annotated[int, Range(64, 1 << 20)] = 256
    """Rows of an optimiser step: a head learns more from many small steps than from few large ones."""
    passes: Annotated[int, Range(1, 3)] = 3
    """How often an answer is gone over."""
    loss: Annotated[str, Choice(LOSSES)] = "kl_div"
    """`kl_div` (from the target's probabilities), `rkl` (reverse: from the head's), `ce` (its likeliest token), `tv`
    (what rejection sampling would refuse), `lk_hybrid` (between `kl_div` and `tv`)."""
    level_decay: Annotated[float, Range(0.0, 1.0)] = 0.9
    """Weight of a level's loss relative to the one before it."""
    feature_weight: Annotated[float, Range(0.0, 1000.0)] = 0.1
    """`eagle` only: weight of the distance to the target's hidden states."""
    weight_decay: Annotated[float, Range(0.0, 10.0)] = 0.01
    clip: Annotated[float, Range(1e-6, 1e6)] = 1.0
    """Gradient norm above which the gradient is scaled down."""
    dtype: Annotated[str, Choice(("auto", *DTYPES))] = "auto"
    """Of the products: `bfloat16`, `float32`, or `auto`: bfloat16 where the hardware has units for it."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class HeadJudgement:
    """What a chain of drafts would be worth on answers that the head did not learn from, at temperature 1."""

    # [levels] share of the rows where the drafts of levels 1 to k are all met
    met: tuple[float, ...]
    # the sharpness that drafts are drawn with, the best of some
    sharpness: float
    # what was judged by; 0: there is nothing to judge by yet
    rows: int

    @property
    def accepted(self) -> float:
        """Tokens accepted per draft, the target's own not counted."""
        return sum(self.met)


class Learner:
    """One head, its optimiser, and the answers it learns from.

    Args:
        head: as `heads.py` makes and loads them.
        output_head: [vocab, width] the target's.
    """

    def __init__(self, head: Any, output_head: torch.Tensor, config: LearnerConfig) -> None:
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.head = head.to(self.device).train()
        self.windows = Windows(config.width, config.passes, config.seed)
        self.steps = self.rows = 0
        self._dtype = DTYPES[_dtype(self.device) if config.dtype == "auto" else config.dtype]
        self._weights = [one for one in self.head.parameters() if one.requires_grad]
        self._optimizer = torch.optim.AdamW(self._weights, lr=config.rate, weight_decay=config.weight_decay)
        self._loss = _loss_of(config.loss, self.device)
        self.retarget(output_head)

    def retarget(self, output_head: torch.Tensor, embedding: torch.Tensor | None = None) -> None:
        """The target's output head and embedding, after its weights changed."""
        self._output_head = output_head.to(self.device, torch.float32)
        is_eagle = isinstance(self.head, EagleHead)
        if is_eagle:
            self.head.output_head = self._output_head
        if embedding is not None:
            own = self.head.embedding if is_eagle else self.head.embed_tokens.weight.data
            own.copy_(embedding)

    def add(self, answer: Rows) -> bool:
        """Learn from an answer, or judge by it. Returns whether it is of use."""
        return self.windows.add(answer)

    def step(self) -> float | None:
        """One optimiser step; its loss in nats per row, over all levels. None: nothing is left to learn from.

        A step whose loss or gradient is no number changes no weight.
        """
        windows = self.windows.draw(self.config.batch_rows)
        if not windows:
            return None
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.rate * min(1.0, (self.steps + 1) / _WARM)
        loss = self._loss_on(windows)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._weights, self.config.clip)
        if torch.isfinite(norm):
            self._optimizer.step()
            self.steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        self.rows += sum(one.end - one.begin for one in windows)
        return float(loss.detach() + 0.0 * norm)

    @torch.no_grad()
    def judge(
        self, answers: Sequence[Rows] | None = None, goes_on: Callable[[], bool] = lambda: True
    ) -> HeadJudgement | None:
        """What the head is worth on these answers, or on those held out.

        Args:
            goes_on: asked between parts of about a step's time; False: the judgement is given up.
        """
        levels = self.config.num_levels
        windows = whole(self.windows.held_out() if answers is None else answers)
        parts = _parts_of(windows)
        met, sharp = torch.zeros(levels, dtype=torch.float64), 1.0
        self.head.eval()
        if parts:
            sharp = max(SHARPNESS, key=lambda one: float(self._met_on(parts[len(parts) // 2], 1, one)))
        done = [self._met_on(part, levels, sharp) for part in parts if goes_on()]
        self.head.train()
        if len(done) < len(parts):
            return None
        met += sum(done)
        rows = sum(one.end - one.counts for one in windows)
        return HeadJudgement(tuple((met / max(rows, 1)).tolist()), sharp, rows)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on, but for the answers."""
        return {
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "windows": self.windows.state_dict(),
            "steps": self.steps,
            "rows": self.rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.windows.load_state_dict(state["windows"])
        self.steps, self.rows = int(state["steps"]), int(state["rows"])

    # --- one pass ----------------------------------------------------------------------------------------------------

    def _loss_on(self, windows: Sequence[Window]) -> torch.Tensor:
        batch = self._batch_of(windows, self.config.num_levels)
        width, drafted = batch.positions.shape[1], drafted_tokens(self.head)
        with torch.no_grad():
            target = batch.last @ (self._output_head if drafted is None else self._output_head[drafted]).T
        loss = torch.zeros((), device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._dtype is torch.bfloat16):
            for level, hidden in enumerate(self._unrolled(batch, self.config.num_levels)):
                inside = _inside(batch, level)
                wanted = target[:, level : level + width][inside]
                own = self._loss(logits_of(self.head, hidden[inside])[None], wanted[None]).sum()
                if isinstance(self.head, EagleHead):
                    features = batch.last[:, level : level + width][inside]
                    distance = functional.smooth_l1_loss(hidden[inside], features, reduction="none").mean(dim=-1).sum()
                    own = own + self.config.feature_weight * distance
                loss = loss + self.config.level_decay**level * own / inside.sum().clamp(min=1)
        return loss

    def _met_on(self, windows: Sequence[Window], num_levels: int, sharp: float) -> torch.Tensor:
        """[levels] how many rows' drafts of levels 1 to k are all met, as is to be expected."""
        batch = self._batch_of(windows, num_levels)
        width, drafted = batch.positions.shape[1], drafted_tokens(self.head)
        met = torch.zeros(num_levels, dtype=torch.float64)
        # that all levels before were met, the answer's tokens being what they are
        so_far = torch.ones(batch.counts.shape, device=self.device)
        following = functional.pad(batch.tokens, (0, 1))
        for level, hidden in enumerate(self._unrolled(batch, num_levels)):
            inside = _inside(batch, level)
            p = (batch.last[:, level : level + width][inside] @ self._output_head.T).softmax(dim=-1)
            own = (sharp * logits_of(self.head, hidden[inside]).float()).softmax(dim=-1)
            q = own if drafted is None else torch.zeros_like(p)
            if drafted is not None:
                q[:, drafted] = own
            met[level] = (so_far[inside] * match_rate(p, q)).sum().double().cpu()
            chosen = following[:, level + 1 : level + 1 + width][inside]
            so_far[inside] *= match_rate_of(p, q, chosen)
        return met

    def _batch_of(self, windows: Sequence[Window], num_levels: int) -> WindowBatch:
        batch = batch_of(windows, num_levels)
        columns = (getattr(batch, name).to(self.device) for name in WindowBatch.__dataclass_fields__)
        return WindowBatch(*(one.float() if one.is_floating_point() else one for one in columns))

    def _unrolled(self, batch: WindowBatch, num_levels: int) -> Iterator[torch.Tensor]:
        return unrolled(self.head, batch.tokens, batch.before, batch.positions, num_levels)


def _parts_of(windows: Sequence[Window]) -> list[list[Window]]:
    """Windows of about equal lengths share a part."""
    parts: list[list[Window]] = []
    for one in sorted(windows, key=lambda one: one.end - one.begin):
        if not parts or (len(parts[-1]) + 1) * (one.end - one.begin) > _JUDGED:
            parts.append([])
        parts[-1].append(one)
    return parts


def _inside(batch: WindowBatch, level: int) -> torch.Tensor:
    """[B, W] rows that count at a level: what they would draft is still the answer's."""
    places = torch.arange(batch.counts.shape[1], device=batch.counts.device)
    return batch.counts & (places + level + 1 < batch.rest[:, None])


def _loss_of(name: str, device: torch.device) -> Any:
    from speculators.losses import resolve_loss_config

    return resolve_loss_config(name, "fused" if device.type == "cuda" else "eager")[name][0]


def _dtype(device: torch.device) -> str:
    if device.type == "cuda":
        return "bfloat16"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
