import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import beams as reference
from vllm_specrollout.drafters.beams import LEAST_NODES, WIDTHS, BeamTrees, beam_for

VOCAB = 12


class Model:
    """Children of a path, by a seed: their probabilities sum up to less than 1."""

    def __init__(self, seed: int, children: int) -> None:
        self._seed, self._children = seed, children

    def __call__(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        draw = random.Random(hash((self._seed, path)))
        tokens = draw.sample(range(VOCAB), self._children)
        weights = sorted((draw.random() ** 3 for _ in tokens), reverse=True)
        # as float32 holds them
        logs = torch.tensor([w / (sum(weights) + 0.1) for w in weights]).log().tolist()
        return list(zip(tokens, logs, strict=True))


def drafted(models: list[Model], depth: int, beam: int, ends: list[list[int]], chains: list[bool]) -> BeamTrees:
    trees = BeamTrees(torch.tensor(ends), torch.tensor(chains), beam)
    paths: list[list[tuple[int, ...]]] = [[()] for _ in models]
    for _ in range(depth):
        level = [[model(path) for path in own] for model, own in zip(models, paths, strict=True)]
        tokens = torch.tensor([[[t for t, _ in one] for one in own] for own in level])
        logs = torch.tensor([[[p for _, p in one] for one in own] for own in level])
        parents, chosen = trees.add(tokens, logs)
        paths = [
            [(*own[p], t) for p, t in zip(above.tolist(), more.tolist(), strict=True)]
            for own, above, more in zip(paths, parents, chosen, strict=True)
        ]
    return trees


def assert_best(found: tuple[torch.Tensor, ...], r: int, wanted: list[Any]) -> None:
    """A request's nodes, and nothing behind them."""
    (tokens, parents, paths), count = (column[r].tolist() for column in found), len(wanted)
    rest = [-1] * (len(tokens) - count)
    assert tokens == [one.token for one in wanted] + rest
    assert parents == [one.parent for one in wanted] + rest
    assert paths[:count] == pytest.approx([math.exp(one.joint) for one in wanted], rel=1e-4)
    assert not any(paths[count:])


@given(
    seed=st.integers(0, 10_000),
    requests=st.integers(1, 3),
    depth=st.integers(1, 5),
    beam=st.sampled_from(WIDTHS),
    children=st.integers(1, 5),
    width=st.integers(1, 40),
    data=st.data(),
)
def test_trees_are_those_of_the_specification(
    seed: int, requests: int, depth: int, beam: int, children: int, width: int, data: st.DataObject
) -> None:
    chains = data.draw(st.lists(st.booleans(), min_size=requests, max_size=requests))
    limits = data.draw(st.lists(st.integers(0, 50), min_size=requests, max_size=requests))
    one_end = st.integers(-1, VOCAB - 1)
    ends = data.draw(st.lists(st.lists(one_end, min_size=2, max_size=2), min_size=requests, max_size=requests))
    models = [Model(seed + r, children) for r in range(requests)]
    found = drafted(models, depth, beam, ends, chains).best(torch.tensor(limits), width)
    for r, model in enumerate(models):
        nodes = reference.grown(model, depth, beam, set(ends[r]), is_chain=chains[r])
        assert_best(found, r, reference.best(nodes, min(limits[r], width)))


@given(
    seed=st.integers(0, 10_000),
    depth=st.integers(1, 6),
    children=st.integers(1, 5),
    limit=st.integers(0, 30),
    end=st.integers(-1, VOCAB - 1),
    is_chain=st.booleans(),
)
def test_combs_are_those_of_the_specification(
    seed: int, depth: int, children: int, limit: int, end: int, is_chain: bool
) -> None:
    model, path, levels = Model(seed, children), (), []
    for _ in range(depth):
        levels.append(model(path))
        path = (*path, levels[-1][0][0])
    columns = [torch.tensor([[[one[i] for one in level] for level in levels]]) for i in (0, 1)]
    trees = BeamTrees.of_comb(torch.tensor([[end]]), torch.tensor([is_chain]), *columns)
    wanted = reference.best(reference.comb(levels, {end}, is_chain=is_chain), limit)
    assert_best(trees.best(torch.tensor([limit]), 30), 0, wanted)


@given(seed=st.integers(0, 10_000), nodes=st.integers(1, 40))
def test_a_wider_beam_reaches_no_less_with_as_many_nodes(seed: int, nodes: int) -> None:
    sums = [
        float(drafted([Model(seed, 5)], 5, beam, [[-1]], [False]).best(torch.tensor([nodes]), nodes)[2].sum())
        for beam in (1, 12 * 5**4)
    ]
    # all nodes of a level go on: nothing better can be drafted
    assert sums[1] >= sums[0] - 1e-6


def test_where_trees_are_small_or_rows_are_few_one_node_goes_on() -> None:
    assert [beam_for(n, 1, 64) for n in (1, LEAST_NODES - 1, LEAST_NODES, 20, 64)] == [1, 1, 2, 4, 8]
    assert [beam_for(64, requests, 16) for requests in (1, 2, 4, 8, 16, 32)] == [8, 8, 4, 2, 1, 1]


def test_where_a_passs_rows_are_dear_fewer_nodes_go_on() -> None:
    assert [beam_for(64, 1, 64, pass_ms=1.0, row_ms=row) for row in (0.001, 0.03, 0.05, 0.2)] == [8, 4, 2, 1]
