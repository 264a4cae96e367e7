"""The lookup's two launches against the plain way, on texts of few different tokens, where much agrees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from vllm_specrollout.kernels.lookup import naive
from vllm_specrollout.kernels.lookup.kernel import Lookup

from tests.reference.history import DOUBT, context_class

UNWRITTEN = -1_234_567_890
"""As NaN: a token that no text has, which nothing may be drafted from."""
ROWS, TOKENS, PAST = 4, 48, 5
SHAPES = [(4, 4, 2), (32, 16, 4), (2, 8, 3)]


@dataclass
class Case:
    """A batch as the kernel reads it; the fields are named in `Lookup`."""

    texts: np.ndarray
    spans: np.ndarray
    running: np.ndarray
    prompts: np.ndarray
    lengths: np.ndarray
    batch: np.ndarray
    limits: np.ndarray
    branches: np.ndarray
    ends: np.ndarray
    tile: int

    def texts_of(self, request: int) -> list[naive.Text]:
        own, problem, *siblings = self.batch[request].tolist()
        past = self.spans[problem].tolist() if problem >= 0 else []
        texts = [naive.Text(self.texts[begin:end], weight=np.float32(2 ** (w / 8))) for begin, end, w in past]
        for row in siblings:
            if row >= 0:
                first = max(int(self.prompts[row]) - 1, 0)
                texts.append(naive.Text(self.running[row, : self.lengths[row]], first=first))
        return [*texts, naive.Text(self.running[own, : self.lengths[own]])]

    def most_tiles(self) -> int:
        """By what a host knows: running texts may have come to their rows' ends."""
        counts = []
        for _, problem, *siblings in self.batch.tolist():
            past = self.spans[problem].tolist() if problem >= 0 else []
            places = [end - begin - 1 for begin, end, _ in past]
            places += [TOKENS - 1 - max(int(self.prompts[row]) - 1, 0) for row in siblings if row >= 0] + [TOKENS - 1]
            counts.append(sum(-(-max(most, 0) // self.tile) for most in places))
        return max(counts)

    def plainly(self, request: int, nodes: int, **sizes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        own = self.running[self.batch[request, 0]]
        own = own[: self.lengths[self.batch[request, 0]]]
        limit, ends, is_chain = int(self.limits[request]), self.ends[request].tolist(), not self.branches[request]
        return naive.look_up(
            self.texts_of(request), own, ends, limit, nodes, is_chain=is_chain, tile=self.tile, **sizes
        )

    def looked_up(self, nodes: int, device: torch.device, **sizes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        columns = [
            torch.from_numpy(np.ascontiguousarray(column, dtype=np.int32)).to(device)
            for column in (
                self.texts, self.spans, self.running, self.prompts, self.lengths, self.batch, self.limits,
                self.branches, self.ends,
            )
        ]  # fmt: skip
        most = self.most_tiles()
        lookup = Lookup(nodes, len(self.batch), most * len(self.batch), device, tile=self.tile, **sizes)
        lookup.drafts.fill_(UNWRITTEN)
        lookup.parents.fill_(UNWRITTEN)
        lookup.chances.fill_(float("nan"))
        drafts, parents, chances = lookup(*columns, most)
        return drafts.cpu().numpy(), parents.cpu().numpy(), chances.cpu().numpy()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    vocabulary = draw(st.sampled_from([1, 2, 3, 9]))

    def unwritten_or_stale(shape: int | tuple[int, ...]) -> np.ndarray:
        stale = rng.integers(0, vocabulary, shape, np.int32)
        return np.full_like(stale, UNWRITTEN) if draw(st.booleans()) else stale

    texts, spans = unwritten_or_stale(500), np.zeros((2, PAST, 3), np.int32)
    at, longest = 0, draw(st.sampled_from([5, 45]))
    for span in spans.reshape(-1, 3):
        begin = at + int(rng.integers(0, 4))
        at = begin + int(rng.integers(0, longest))
        texts[begin:at] = rng.integers(0, vocabulary, at - begin)
        # their weights are powers of two, so that every order of adding them up comes to the same
        span[:] = begin, at if rng.random() < 0.8 else begin, 8 * rng.integers(-2, 3)
    running, lengths = unwritten_or_stale((ROWS, TOKENS)), rng.integers(1, min(TOKENS, 2 * longest) + 1, ROWS)
    for row, length in zip(running, lengths, strict=True):
        row[:length] = rng.integers(0, vocabulary, length)
    requests, siblings = draw(st.integers(1, ROWS)), draw(st.integers(0, ROWS - 1))
    batch = np.full((requests, 2 + siblings), -1)
    for request, slot in enumerate(rng.permutation(ROWS)[:requests].tolist()):
        others = [row for row in range(ROWS) if row != slot][: int(rng.integers(0, siblings + 1))]
        batch[request, : 2 + len(others)] = [slot, rng.integers(-1, 2), *others]
    ends = rng.integers(-1, vocabulary, (requests, draw(st.integers(1, 3))))
    return Case(
        texts,
        spans,
        running,
        np.minimum(rng.integers(0, 9, ROWS), lengths),
        lengths,
        batch,
        rng.integers(0, 12, requests),
        rng.integers(0, 2, requests),
        ends if draw(st.booleans()) else np.full_like(ends, -1),
        draw(st.sampled_from([16, 32])),
    )


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(1, 10), st.integers(1, 10), st.sampled_from(SHAPES))
def test_trees_and_chains_of_one_batch_are_those_of_the_plain_way(
    device: torch.device, case: Case, nodes: int, max_depth: int, shape: tuple[int, int, int]
) -> None:
    sizes = {"max_depth": max_depth, **dict(zip(("reach", "voting", "per_tile"), shape, strict=True))}
    drafts, parents, chances = case.looked_up(nodes, device, **sizes)
    for request in range(len(case.batch)):
        expected = case.plainly(request, nodes, **sizes)
        assert drafts[request].tolist() == expected[0].tolist()
        assert parents[request].tolist() == expected[1].tolist()
        np.testing.assert_allclose(chances[request], expected[2], rtol=1e-5)


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 10), st.integers(1, 10))
def test_a_tree_is_best_first_and_names_no_token_twice_at_a_node(case: Case, nodes: int, max_depth: int) -> None:
    case.branches[:] = 1
    for request in range(len(case.batch)):
        drafts, parents, chances = case.plainly(request, nodes, max_depth=max_depth)
        count = int((drafts >= 0).sum())
        assert count <= min(nodes, case.limits[request]) and (drafts[count:] == -1).all()
        assert not set(drafts[:count].tolist()) & set(case.ends[request].tolist())
        edges = list(zip(parents[:count].tolist(), drafts[:count].tolist(), strict=True))
        assert len(set(edges)) == count
        depths = dict[int, int]([(-1, 0)])
        for node, (parent, _) in enumerate(edges):
            depths[node] = depths[parent] + 1
        assert max(depths.values()) <= max_depth
        assert (chances[:count] > 0).all() and (np.diff(chances) <= 0).all()


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(1, 10))
def test_a_chain_is_a_tree_s_most_probable_walk_from_the_root(case: Case, nodes: int) -> None:
    """Where a node's places offer its most probable child first."""
    for request in range(len(case.batch)):
        case.limits[request], case.branches[request] = nodes, 0
        chain, follows, chances = case.plainly(request, nodes, max_depth=nodes)
        count = int((chain >= 0).sum())
        assert follows.tolist() == [*range(-1, count - 1), *[-1] * (nodes - count)]
        case.limits[request], case.branches[request] = 200, 1
        tree, parents, paths = case.plainly(request, 200, max_depth=nodes)
        at = -1
        for token, chance in zip(chain[:count], chances[:count], strict=True):
            at = next(node for node in range(200) if parents[node] == at and tree[node] >= 0)
            assert (tree[at], paths[at]) == (token, chance)


@pytest.mark.parametrize(("requests", "tiles"), [(1, 2), (2, 0)])
def test_more_than_there_is_memory_for_is_refused(device: torch.device, requests: int, tiles: int) -> None:
    lookup, rows = Lookup(4, 1, 1, device, max_depth=4), torch.zeros(requests, 2, dtype=torch.int32, device=device)
    none = torch.zeros(1, 1, 3, dtype=torch.int32, device=device)
    words = f"{requests} requests of {tiles} tiles and 2 texts each, where there is room for 1 requests, 1 tiles"
    with pytest.raises(ValueError, match=words):
        lookup(rows[0], none, rows, rows[0], rows[0], rows, rows[0], rows[0], rows[:, :1], tiles)


def test_votes_are_shared_out_by_the_table_of_the_index() -> None:
    assert [16 * doubt for doubt in naive.DOUBTS] == list(DOUBT)
    assert [naive.kind_of(tokens) for tokens in range(1, 80)] == [context_class(tokens) for tokens in range(1, 80)]
