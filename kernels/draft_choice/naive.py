"""The specification of `kernel.py`: one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

LOOKED, LINED, MODELLED = range(3)
"""Kinds of drafts: looked up, carried in a line, and a model's."""
WITHHELD = 16
"""Added to the kind of a draft whose verdict is withheld."""
CHAIN_CHANCE = 0.75
"""That a line's next token holds, before anything is known of it."""
TENTHS = 10
"""Chances that factors tell apart."""


class Bid(NamedTuple):
    """One request's of one kind. Parents come before their children; -1 is the root."""

    tokens: list[int]
    parents: list[int]
    chances: list[float]
    """That each node holds where its parent does."""


def choose(
    words: torch.Tensor, confidence: torch.Tensor, rows: torch.Tensor, running: torch.Tensor, lengths: torch.Tensor,
    limits: torch.Tensor, until: torch.Tensor, ends: torch.Tensor, factors: torch.Tensor, *,
    looked: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None, lines: torch.Tensor | None = None,
    modelled: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None, withheld: int = -1,
    has_branches: bool = False,
) -> None:  # fmt: skip
    """As `kernel.choose`."""
    width = confidence.shape[1]
    for request, row in enumerate(rows.tolist()):
        length, limit, barred = int(lengths[row]), int(limits[request]), ends[request].tolist()
        found: dict[int, Bid] = {}
        if looked is not None:
            found[LOOKED] = walked(*(column[request].tolist() for column in looked))
        if lines is not None:
            begin, *line = lines[row].tolist()
            since = running[row, begin:length].tolist()
            is_good = 0 < begin <= length and since == line[: len(since)]
            found[LINED] = chain(line[len(since) :] if is_good else [], width, limit, barred)
        if modelled is not None:
            found[MODELLED] = walked(*(column[request].tolist() for column in modelled))
        known = {kind: calibrated(draft, factors[kind].tolist()) for kind, draft in found.items()}
        # of equals the first
        kind = max(found, key=lambda kind: expected(found[kind], known[kind]))
        tokens, parents, chances = found[kind]
        there = min(len(tokens), max(int(until[request]) - length - 1, 0))
        own = torch.tensor([[-1] * width] * 2 + [[0] * width], dtype=torch.int32)
        own[0, :there], own[1, : len(parents)] = torch.tensor(tokens[:there]), torch.tensor(parents)
        own[2, : len(chances)] = torch.tensor(chances, dtype=torch.float32).view(torch.int32)
        words[row, :-1], words[row, -1] = own.flatten(), kind + WITHHELD * (request == withheld)
        confidence[request] = torch.tensor(known[kind][:there] + [0.0] * (width - there))


def walked(tokens: Sequence[int], parents: Sequence[int], paths: Sequence[float]) -> Bid:
    """A lookup's or a model's, which say how likely the target walks down to each node."""
    size = next((j for j, token in enumerate(tokens) if token < 0), len(tokens))
    above = [paths[parent] if parent >= 0 else 1.0 for parent in parents[:size]]
    chances = [path / most for path, most in zip(paths, above, strict=False)]
    return Bid(list(tokens[:size]), list(parents[:size]), chances)


def chain(tokens: Sequence[int], width: int, limit: int, ends: Sequence[int]) -> Bid:
    """The tokens down to where there are no more, a request may have no more, or one ends it."""
    most = min(len(tokens), width, limit)
    size = next((j for j in range(most) if tokens[j] < 0 or tokens[j] in ends), most)
    return Bid(list(tokens[:size]), list(range(-1, size - 1)), [CHAIN_CHANCE] * size)


def calibrated(draft: Bid, factors: Sequence[float]) -> list[float]:
    """What the chances come to by what held lately."""
    return [min(chance * factors[min(int(chance * TENTHS), TENTHS - 1)], 1.0) for chance in draft.chances]


def expected(draft: Bid, chances: Sequence[float]) -> float:
    """Tokens that it brings."""
    paths: list[float] = []
    for parent, chance in zip(draft.parents, chances, strict=True):
        paths.append(chance * (paths[parent] if parent >= 0 else 1.0))
    return sum(paths)
