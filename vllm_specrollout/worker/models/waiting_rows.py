"""Rows of the target that a drafting model has not seen yet.

What belongs here: which rows of a step hold, and the rows of many steps kept until the model is fed with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_specrollout.types import IntArray, TreeBatch, VerifyResult

MOST_PARTS = 256
"""Steps whose rows are kept apart; with more they become one, so that looking through them takes little time."""


@dataclass(slots=True)
class Rows:
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


def of_those_there(
    names: Sequence[str | None], counts: np.ndarray, index: np.ndarray
) -> tuple[list[str | None], np.ndarray, np.ndarray]:
    """Names, counts and rows, without those of requests that are gone or never drafted for (None)."""
    is_there = np.asarray([name is not None for name in names], dtype=np.bool_)
    return [name for name in names if name is not None], counts[is_there], index[np.repeat(is_there, counts)]


class WaitingRows:
    """What a model has to be fed with, in the order in which it came."""

    def __init__(self) -> None:
        self._parts: list[Rows] = []
        self.num_bytes = 0
        """Of hidden states that wait, those of requests that are gone included."""

    def add(self, rows: Rows) -> None:
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

    def last_position(self, request_id: str) -> int | None:
        """Of its rows that wait; None: none does."""
        for rows in reversed(self._parts):
            if request_id in rows.request_ids:
                last = len(rows.request_ids) - 1 - rows.request_ids[::-1].index(request_id)
                return int(rows.positions[int(rows.counts[: last + 1].sum()) - 1])
        return None

    def forget(self, request_id: str) -> None:
        """Its rows are not fed."""
        for rows in self._parts:
            rows.request_ids = [None if name == request_id else name for name in rows.request_ids]

    def drop_gone(self) -> None:
        """Let go of rows that are not fed any more."""
        self._are(_without(rows, {None}) if None in rows.request_ids else rows for rows in self._parts)

    def take(self, names: Sequence[str]) -> Rows:
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
        return Rows(list(names), own, one.token_ids[taken], one.positions[taken], one.hidden[taken])

    def _are(self, parts: Iterable[Rows]) -> None:
        self._parts = [rows for rows in parts if rows.request_ids]
        self.num_bytes = sum(rows.hidden.nbytes for rows in self._parts)


def _joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, one behind another; a request may come several times."""
    columns = (torch.cat([getattr(rows, name) for rows in parts]) for name in ("token_ids", "positions", "hidden"))
    ids = [name for rows in parts for name in rows.request_ids]
    return Rows(ids, np.concatenate([rows.counts for rows in parts]), *columns)


def _without(rows: Rows, gone: Set[str | None]) -> Rows:
    """The rows of the other requests."""
    stays = np.asarray([name not in gone for name in rows.request_ids], dtype=np.bool_)
    kept = torch.from_numpy(np.flatnonzero(np.repeat(stays, rows.counts)))
    left = [name for name in rows.request_ids if name not in gone]
    return Rows(left, rows.counts[stays], rows.token_ids[kept], rows.positions[kept], rows.hidden[kept])


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
