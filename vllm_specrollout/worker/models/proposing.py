"""Passes of a model that drafts, and the rows of the target that it has not seen yet.

What belongs here: who is drafted for, which rows of a step hold, and the rows of many steps kept until the model is fed
with them. A pass is laid out for vLLM's own proposers in v1/proposer.py; V2's draft on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_specrollout.drafters.base import UNBOUNDED
from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.training.heads import UNTRAINED
from vllm_specrollout.types import IntArray, RequestView, TreeBatch, VerifyResult
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


class NoiseAhead(Protocol):
    """One engine's noise, as far as a drafter meets it."""

    def ahead(self, tokens: torch.Tensor, entries: Sequence[Any], depth: int) -> torch.Tensor:
        """[R, M] float32 the Gumbel noise of these tokens [R, M] at the position so far ahead, with which the target's
        own token is chosen there; of greedy requests anything finite."""


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


def without_adapters(head: torch.nn.Module, target: torch.nn.Module) -> None:
    """Have a head that took over modules of the target's use them without adapters (LoRA): which adapter a row has is
    known of the target's own rows alone."""
    own = {id(module) for module in target.modules()}
    for owner in [module for module in head.modules() if id(module) not in own]:
        for name, child in list(owner.named_children()):
            if id(child) in own:
                owner._modules[name] = getattr(child, "base_layer", child)


@dataclass(slots=True)
class Seat:
    """What the runner knows of a request that is drafted for."""

    entry: Any
    # its row in the block table, and the blocks it has there
    row: int
    num_blocks: int
    # the token behind the last row that is fed: sampled last, or next in its prompt
    next_token: int
    # tokens before the one behind its last row, fed or not
    next_position: int


def most_tokens(proposer: Any, max_depth: int) -> int:
    """Tokens of a request that leave room for a whole draft in the context of the model that drafts."""
    given = proposer.vllm_config.speculative_config
    own, context = given.draft_model_config, given.draft_model_config.max_model_len
    if given.method in ("eagle", "eagle3") and given.max_model_len is None:
        # vLLM gives it as many positions as the target has
        context = max(context, getattr(own.hf_config, "max_position_embeddings", context))
    # up to the target's own length, vLLM's passes end there by themselves
    return UNBOUNDED if context >= proposer.vllm_config.model_config.max_model_len else max(context - max_depth, 0)


def path_of(proposer: Any) -> Path:
    """The folder that vLLM loaded the model from that drafts."""
    config = proposer.vllm_config.speculative_config.draft_model_config
    if Path(config.model).exists():
        return Path(config.model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(config.model, revision=config.revision, local_files_only=True))


def is_untrained(proposer: Any) -> bool:
    """Whether it was only made to be loaded, and drafts nothing until it gets other weights."""
    return (path_of(proposer) / UNTRAINED).exists()


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
        self.most_tokens = most_tokens(proposer, max_depth)
        """Of a request that is drafted for, and of one that the model is fed with: those behind them it never sees."""
        self._max_rows, self._extra = max_rows, extra
        # of one batch: its buffers must hold some rows of each
        self.most_requests = max_rows // (2 + extra)

    def run(self, rows: HeldRows, seats: Sequence[Seat], depth: int) -> float:
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
        self, seats: Sequence[Seat], rows: HeldRows, index: Sequence[np.ndarray], next_tokens: np.ndarray, depth: int
    ) -> None:
        """One pass, and as many more as levels are drafted.

        Args:
            index: for each seat, which of the rows.
            next_tokens: [R] int32 the token behind each seat's rows.
        """
        raise NotImplementedError


MOST_PARTS = 256
"""Steps whose rows are kept apart; with more they become one, so that looking through them takes little time."""


@dataclass(slots=True)
class HeldRows:
    """Rows of some requests, request after request, each in the order of its positions."""

    # [R]; None: the request is gone
    request_ids: list[str | None]
    # [R] int64 rows of each request
    counts: np.ndarray
    # [rows] int32 tokens; int64 positions
    token_ids: torch.Tensor
    positions: torch.Tensor
    # [rows, hidden] of the target, as the model takes them
    hidden: torch.Tensor


def first_rows(
    names: Sequence[str], counts: np.ndarray, kept: np.ndarray, index: np.ndarray
) -> tuple[list[str | None], np.ndarray, np.ndarray]:
    """Names, counts and rows, with so many rows of each request as are `kept` [R], without those that keep none."""
    behind = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    return [n for n, k in zip(names, kept, strict=True) if k], kept[kept > 0], index[behind < np.repeat(kept, counts)]


class WaitingRows:
    """What a model has to be fed with, in the order in which it came."""

    def __init__(self) -> None:
        self._parts: list[HeldRows] = []
        self.num_bytes = 0
        """Of hidden states that wait, those of requests that are gone included."""

    def add(self, rows: HeldRows) -> None:
        self._parts.append(rows)
        self.num_bytes += rows.hidden.nbytes
        if len(self._parts) > MOST_PARTS:
            names = self.request_ids()
            self._are([self.take(names)] if names else [])

    def __len__(self) -> int:
        return sum(len(rows.token_ids) for rows in self._parts)

    def request_ids(self) -> list[str]:
        """Requests with rows that wait."""
        return list(dict.fromkeys(name for rows in self._parts for name in rows.request_ids if name is not None))

    def forget(self, request_id: str) -> None:
        """Its rows are not fed."""
        for rows in self._parts:
            rows.request_ids = [None if name == request_id else name for name in rows.request_ids]

    def drop_gone(self) -> None:
        """Let go of rows that are not fed any more."""
        self._are(_without(rows, {None}) if None in rows.request_ids else rows for rows in self._parts)

    def take(self, names: Sequence[str]) -> HeldRows:
        """The rows of these requests, in this order; they wait no longer."""
        place: dict[str | None, int] = {name: i for i, name in enumerate(names)}
        # a part with other requests alone is not touched: what waits for long is not copied ever again
        parts = [rows for rows in self._parts if not place.keys().isdisjoint(rows.request_ids)]
        one = _joined(parts)
        owner = np.repeat([place.get(name, -1) for name in one.request_ids], one.counts).astype(np.int64)
        order = np.argsort(owner, kind="stable")
        taken = torch.from_numpy(order[np.searchsorted(owner[order], 0) :])
        gone = {*names, None}
        touched = {id(rows) for rows in parts}
        self._are(_without(rows, gone) if id(rows) in touched else rows for rows in self._parts)
        own = np.bincount(owner[owner >= 0], minlength=len(names))
        return HeldRows(list(names), own, one.token_ids[taken], one.positions[taken], one.hidden[taken])

    def _are(self, parts: Iterable[HeldRows]) -> None:
        self._parts = [rows for rows in parts if rows.request_ids]
        self.num_bytes = sum(rows.hidden.nbytes for rows in self._parts)


def _joined(parts: Sequence[HeldRows]) -> HeldRows:
    """The rows of all parts, one behind another; a request may come several times."""
    columns = (torch.cat([getattr(rows, name) for rows in parts]) for name in ("token_ids", "positions", "hidden"))
    ids = [name for rows in parts for name in rows.request_ids]
    return HeldRows(ids, np.concatenate([rows.counts for rows in parts]), *columns)


def _without(rows: HeldRows, gone: Set[str | None]) -> HeldRows:
    """The rows of the other requests."""
    stays = np.asarray([name not in gone for name in rows.request_ids], dtype=np.bool_)
    kept = torch.from_numpy(np.flatnonzero(np.repeat(stays, rows.counts)))
    left = [name for name in rows.request_ids if name not in gone]
    return HeldRows(left, rows.counts[stays], rows.token_ids[kept], rows.positions[kept], rows.hidden[kept])


def rows_that_hold(
    query_start: IntArray, trees: TreeBatch | None, result: VerifyResult | None
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a step whose tokens are the request's: what was known, and the drafts that were accepted.

    Args:
        query_start: [R + 1] first row of each request; its draft nodes are its last rows.

    Returns:
        [kept] int64 rows, ascending; [R] int64 how many are each request's.
    """
    counts = np.diff(query_start).astype(np.int64)
    if trees is None or result is None:
        return np.arange(int(query_start[-1])), counts
    row_of_node = np.arange(trees.num_nodes) + np.repeat(query_start[1:] - trees.node_start[1:], trees.sizes)
    accepted = result.accepted + np.repeat(trees.node_start[:-1], result.num_accepted)
    holds = np.ones(int(query_start[-1]), dtype=np.bool_)
    holds[row_of_node] = False
    holds[row_of_node[accepted]] = True
    return np.flatnonzero(holds), counts - trees.sizes + result.num_accepted


def have_prompts(query_start: IntArray, trees: TreeBatch | None) -> npt.NDArray[np.bool_]:
    """[R] whether a request's rows have tokens of its prompt among them: more than one that was not drafted."""
    return np.diff(query_start) - (0 if trees is None else trees.sizes) > 1
