"""Which draft a request gets, as the specification says, over memory that holds anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from vllm_specrollout.kernels.draft_choice import kernel, naive

from vllm_specrollout.types import TENTHS

UNWRITTEN = -1_234_567
LINE, LONGEST = 8, 40


def drafts_of(draw: np.random.Generator, requests: int, width: int, *, may_branch: bool) -> list[torch.Tensor]:
    """Tokens, parents and paths as a lookup leaves them; behind a draft's end anything stands for the last two."""
    tokens = draw.integers(0, 5, (requests, width)).astype(np.int32)
    parents = np.tile(np.arange(-1, width - 1, dtype=np.int32), (requests, 1))
    paths = np.full((requests, width), np.nan, dtype=np.float32)
    for r in range(requests):
        size = draw.integers(0, width + 1)
        if may_branch:
            parents[r] = [draw.integers(-1, j) if j else -1 for j in range(width)]
        for j in range(size):
            above = paths[r, parents[r, j]] if parents[r, j] >= 0 else 1.0
            # no chance lies where two tenths meet
            paths[r, j] = above * (draw.integers(0, 10) + draw.uniform(0.2, 0.8)) / 10
        tokens[r, size:], parents[r, size:] = -1, -1
    return [torch.from_numpy(each) for each in (tokens, parents, paths)]


def chosen(how: Any, seed: int, requests: int, width: int, kinds: str, withheld: int, may_branch: bool) -> list[Any]:
    draw = np.random.default_rng(seed)
    rows = draw.permutation(requests + 2)[:requests]
    running = np.full((requests + 2, LONGEST), UNWRITTEN, dtype=np.int32)
    lengths = draw.integers(1, 20, requests + 2).astype(np.int32)
    lines = np.full((requests + 2, 1 + LINE), -1, dtype=np.int32)
    for row in range(requests + 2):
        running[row, : lengths[row]] = draw.integers(0, 3, lengths[row])
        begin = draw.integers(0, 24)
        since = running[row, begin : lengths[row]][:LINE]
        ahead = draw.integers(0, 5, LINE)
        ahead[: len(since)] = since
        if draw.random() < 0.3:
            ahead[draw.integers(0, LINE)] = 4
        if draw.random() < 0.8:
            lines[row] = [begin, *ahead]
            lines[row, 1 + draw.integers(1, LINE + 1) :] = -1
    columns = {
        "words": np.full((requests + 2, 3 * width + 1), UNWRITTEN),
        "limits": draw.integers(0, width + 2, requests),
        "until": draw.integers(1, 60, requests),
        "ends": draw.integers(-1, 5, (requests, draw.choice([1, 4]))),
    }
    ints = {name: torch.from_numpy(each.astype(np.int32)) for name, each in columns.items()}
    confidence = torch.full((requests + 1, width), torch.nan)
    factors = torch.from_numpy(draw.uniform(0.2, 1.6, (3, TENTHS)).astype(np.float32))
    looked, modelled = (tuple(drafts_of(draw, requests, width, may_branch=may_branch)) for _ in range(2))
    how(
        ints["words"], confidence, torch.from_numpy(rows), torch.from_numpy(running), torch.from_numpy(lengths),
        ints["limits"], ints["until"], ints["ends"], factors,
        looked=looked if "l" in kinds else None,
        lines=torch.from_numpy(lines) if "c" in kinds else None, modelled=modelled if "m" in kinds else None,
        withheld=withheld, has_branches=may_branch,
    )  # fmt: skip
    return [ints["words"], confidence]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    requests=st.integers(1, 4),
    width=st.sampled_from([1, 3, 6, 24]),
    kinds=st.sampled_from(["l", "c", "m", "lc", "lm", "cm", "lcm"]),
    withheld=st.integers(-1, 3),
    may_branch=st.booleans(),
)
def test_the_draft_is_chosen_as_specified_and_nothing_else_is_written(
    seed: int, requests: int, width: int, kinds: str, withheld: int, may_branch: bool
) -> None:
    made = (seed, requests, width, kinds, withheld, may_branch)
    (ours, known), (theirs, wanted) = chosen(kernel.choose, *made), chosen(naive.choose, *made)
    as_float = [words[:, 2 * width : 3 * width].contiguous().view(torch.float32) for words in (ours, theirs)]
    torch.testing.assert_close(*as_float, rtol=1e-6, atol=0, equal_nan=True)
    assert ours[:, : 2 * width].tolist() == theirs[:, : 2 * width].tolist()
    assert ours[:, -1].tolist() == theirs[:, -1].tolist()
    torch.testing.assert_close(known, wanted, rtol=1e-5, atol=1e-7, equal_nan=True)


def test_chances_are_told_apart_as_budgets_tell_them_apart() -> None:
    assert naive.TENTHS == TENTHS
