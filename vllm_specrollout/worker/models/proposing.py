"""What a model that drafts needs of a runner: who is drafted for, whose noise it is, and passes of the model.

What belongs here: what is the same on both runners. Each of them lays a pass out for its own kind of vLLM's proposers
(v1/proposer.py, v2/proposer.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.types import RequestView
from vllm_specrollout.worker.models.waiting_rows import Rows
from vllm_specrollout.worker.request import Admission


class Enough(Exception):
    """Drafting further costs more than it brings: leaves the proposer's loop, between two passes."""


class Entry(Protocol):
    """A request that is drafted for."""

    view: RequestView
    admission: Admission

    @property
    def temperature(self) -> float: ...

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the best token, without noise."""
        ...


class Chooses(Protocol):
    """One engine's noise, as far as a drafter meets it."""

    def choose(self, logits: torch.Tensor, entries: Sequence[Any], depth: int) -> torch.Tensor:
        """[R] int64 the tokens that these logits [R, vocab] float32 and the noise so far ahead choose; the best ones of
        greedy requests. A drafter's logits, then, are met by the target's own noise."""
        ...


def check_layers(runner: Any, names: Iterable[str]) -> None:
    """Refuse layers of a model that drafts whose old blocks may be another request's by the time they are written.

    Raises:
        UnsupportedError: a layer has a sliding window: the scheduler frees blocks behind it, and rows may wait longer.
    """
    layers = runner.compilation_config.static_forward_context
    if any(getattr(layers[name], "sliding_window", None) is not None for name in names):
        raise UnsupportedError(
            "the model that drafts has layers with a sliding window, whose blocks are freed while rows wait for it",
            "give another model, or drop `--speculative-config`",
        )


@dataclass(slots=True)
class Seat:
    """What the runner knows of a request that is drafted for."""

    entry: Any
    # its row in the block table, and the blocks it has there
    row: int
    num_blocks: int
    # the token behind its last row: sampled last, or next in its prompt
    next_token: int


class Proposer:
    """Runs one of vLLM's proposers on rows of the target that we choose.

    Args:
        proposer: vLLM's, its model loaded.
        max_depth: most levels of a draft.
        max_rows: most rows of a pass, what is drafted included.
        extra: rows of a pass that each request takes beside those that it is fed with.
    """

    def __init__(self, proposer: Any, *, max_depth: int, max_rows: int, extra: int) -> None:
        self.of_vllm = proposer
        self.draw: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits.argmax(dim=-1)
        """[R, vocab] logits -> [R] int64 tokens of the next level; may raise `Enough`."""
        self.max_depth = max_depth
        self.is_one_pass = False
        """Whether one pass gives all levels, so that another one costs nothing."""
        self._max_rows, self._extra = max_rows, extra
        # of one batch: its buffers must hold some rows of each
        self.most_requests = max_rows // (2 + extra)

    @property
    def path(self) -> Path:
        """The folder that vLLM loaded the model from."""
        config = self.of_vllm.vllm_config.speculative_config.draft_model_config
        if Path(config.model).exists():
            return Path(config.model)
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(config.model, revision=config.revision, local_files_only=True))

    def run(self, rows: Rows, seats: Sequence[Seat], depth: int) -> float:
        """Feed rows, at least one for each seat and in the seats' order, and draft so many levels.

        Returns:
            milliseconds that it took.
        """
        begin = time.perf_counter()
        room = self._max_rows - self._extra * len(seats)
        ends = np.cumsum(rows.counts)
        next_tokens = np.asarray([seat.next_token for seat in seats], dtype=np.int32)
        first = ends - rows.counts
        # what does not fit into one pass: the fronts of the longest requests go ahead, and yield nothing
        while (total := int((ends - first).sum())) > room:
            longest = int((ends - first).argmax())
            count = min(total - room, int(ends[longest] - first[longest]) - 1, room)
            own = slice(int(first[longest]), int(first[longest]) + count)
            behind = rows.token_ids[own.stop : own.stop + 1].cpu().numpy()
            self._pass([seats[longest]], rows, [np.arange(own.start, own.stop)], behind, 0)
            first[longest] += count
        index = [np.arange(a, b) for a, b in zip(first.tolist(), ends.tolist(), strict=True)]
        self._pass(seats, rows, index, next_tokens, depth)
        return (time.perf_counter() - begin) * 1e3

    def draw_all(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, levels] the tokens of all levels of one pass, whose logits are [R, levels, vocab].

        Drawn in order, each with the noise of its own position: drawn independently they would hardly ever be met.
        """
        return torch.stack([self.draw(logits[:, level]) for level in range(logits.shape[1])], dim=1)

    def _pass(
        self, seats: Sequence[Seat], rows: Rows, index: Sequence[np.ndarray], next_tokens: np.ndarray, depth: int
    ) -> None:
        """One pass, and as many more as levels are drafted.

        Args:
            index: for each seat, which of the rows.
            next_tokens: [R] int32 the token behind each seat's rows.
        """
        raise NotImplementedError
