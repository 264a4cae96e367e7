"""Attention in two launches against its specification: a context by PyTorch, then the kernel over the nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from vllm_specrollout.kernels.tree_attention import kernel
from vllm_specrollout.kernels.tree_attention.naive import naive_tree_attention, visible_slots

from tests.kernels.conftest import HAS_GPU
from tests.launches import watch

CHAIN_OF_5 = (-1, 0, 1, 2, 3)
BUSH = (-1, 0, 0, 2, -1, 4, 2)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BLOCK, PADDING = 16, 3


@dataclass(frozen=True)
class Request:
    """`seed` fixes keys, values and queries: equal requests hold equal numbers wherever they stand."""

    context: int
    """Keys below the first node, the root's among them."""
    parents: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Shape:
    head_size: int = 64
    kv_heads: int = 2
    group: int = 2
    dtype: torch.dtype = torch.float32
    softcap: float = 0.0
    most_nodes: int = 64

    @property
    def scale(self) -> float:
        return self.head_size**-0.5


@dataclass
class Step:
    """A step's tensors, with NaN wherever nothing may be read. Arguments of the kernel by name, and the cache's."""

    requests: list[Request]
    shape: Shape
    given: dict[str, Any] = field(default_factory=dict)
    wanted: torch.Tensor | None = None

    def attend(self) -> torch.Tensor:
        """The kernel's output."""
        shape, given = self.shape, dict(self.given)
        given["out"] = given["out"].clone()
        kernel.attend_to_nodes(**given, scale=shape.scale, softcap=shape.softcap, most_nodes=shape.most_nodes)
        return given["out"]

    def wrong(self) -> str:
        """What of the kernel's output is not as specified; empty: nothing."""
        found, before = self.attend(), self.given["out"]
        is_node = torch.zeros(len(found), dtype=torch.bool)
        for request, end in zip(self.requests, self.given["starts"][1:].tolist(), strict=True):
            is_node[end - len(request.parents) : end] = True
        off = (found.double() - self.wanted)[is_node].abs()
        # NaN is no less than anything
        if off.numel() and not off.max().item() <= TOLERANCE[found.dtype]:
            return f"a node is off by {off.max().item()}"
        # bit for bit, NaN included
        raw = torch.int32 if found.dtype == torch.float32 else torch.int16
        stays = torch.equal(found[~is_node].view(raw), before[~is_node].view(raw))
        return "" if stays else "a row of no node has changed"


def words_of(parents: tuple[int, ...]) -> list[int]:
    """Ancestors as signed words."""
    words: list[int] = []
    for node, parent in enumerate(parents):
        words.append(1 << node | (words[parent] if parent >= 0 else 0))
    return [word - 2**64 if word >= 2**63 else word for word in words]


def build(requests: list[Request], shape: Shape, device: torch.device) -> Step:
    """Each request's root and nodes are rows of the step; behind the last one there is padding."""
    heads, size, nan = shape.kv_heads * shape.group, shape.head_size, math.nan
    rows = sum(1 + len(request.parents) for request in requests)
    query, out = (torch.full((rows + PADDING, heads, size), nan, dtype=shape.dtype) for _ in range(2))
    own = torch.full((rows + PADDING, shape.kv_heads, 2 * size), nan, dtype=shape.dtype)
    lse = torch.full((heads, rows + PADDING), nan)
    ancestors = torch.full((rows + PADDING,), -1, dtype=torch.int64)
    wanted, starts = torch.zeros(rows + PADDING, heads, size, dtype=torch.float64), [0]
    for request in requests:
        nodes, first = len(request.parents), starts[-1]
        starts.append(first + 1 + nodes)
        numbers = torch.Generator().manual_seed(request.seed)
        kv = torch.randn(request.context + nodes, shape.kv_heads, 2 * size, generator=numbers).to(shape.dtype)
        queries = torch.randn(1 + nodes, heads, size, generator=numbers).to(shape.dtype)
        words = torch.tensor([-1, *words_of(request.parents)])
        query[first : starts[-1]], ancestors[first : starts[-1]] = queries, words
        if nodes:
            own[first + 1 : starts[-1]] = kv[-nodes:]
        before, sums = over_context(queries, kv[: request.context], shape)
        out[first : starts[-1]], lse[:, first + 1 : starts[-1]] = before.to(shape.dtype), sums[:, 1:]
        blocks = -(-len(kv) // BLOCK)
        cache = torch.nn.functional.pad(kv, (0, 0, 0, 0, 0, blocks * BLOCK - len(kv)), value=nan)
        cache = cache.view(blocks, BLOCK, shape.kv_heads, 2 * size).transpose(1, 2)
        wanted[first : starts[-1]] = naive_tree_attention(
            queries, cache[..., :size], cache[..., size:], torch.tensor([0, 1 + nodes]), torch.tensor([len(kv)]),
            torch.arange(blocks)[None], torch.tensor([nodes]), words, scale=shape.scale, softcap=shape.softcap,
        )  # fmt: skip
    given = {
        "query": query, "key": own[..., :size], "value": own[..., size:], "out": out, "lse": lse,
        "starts": torch.tensor(starts, dtype=torch.int32), "ancestors": ancestors,
        "num_nodes": torch.tensor([len(request.parents) for request in requests], dtype=torch.int32),
    }  # fmt: skip
    return Step(requests, shape, {name: value.to(device) for name, value in given.items()}, wanted.to(device))


def over_context(query: torch.Tensor, kv: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all rows to all keys, and the logarithms of its sums."""
    keys, values = kv.float().repeat_interleave(shape.group, 1).split(shape.head_size, dim=-1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * shape.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)


MIXED = [Request(66, seed=2), Request(50, CHAIN_OF_5, seed=3), Request(130, BUSH, seed=4), Request(1, (-1,), seed=5)]


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(group=4, dtype=torch.bfloat16),
        Shape(group=7, dtype=torch.float16, most_nodes=7),
        Shape(80, group=1),
        Shape(96, dtype=torch.bfloat16, most_nodes=16),
        Shape(128, 1, 7, softcap=5.0),
        Shape(256, 1, dtype=torch.bfloat16, softcap=30.0),
        Shape(32, 1, 71, dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_a_step_agrees_with_the_specification_and_rows_of_no_node_stay(shape: Shape, device: torch.device) -> None:
    assert not build(MIXED, shape, device).wrong()


@st.composite
def requests(draw: st.DrawFn) -> Request:
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.sampled_from([0, 1, 2, 9, 33])))]
    return Request(draw(st.integers(1, 200)), tuple(parents), draw(st.integers(0, 99)))


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.lists(requests(), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    group=st.sampled_from([1, 3, 4, 7]),
    head_size=st.sampled_from([32, 64, 96, 128]),
    softcap=st.sampled_from([0.0, 0.0, 4.0]),
    most_nodes=st.sampled_from([33, 64]),
)
def test_any_step_agrees_with_the_specification(
    device: torch.device, batch: list[Request], dtype: torch.dtype, group: int, head_size: int, softcap: float,
    most_nodes: int,
) -> None:  # fmt: skip
    assert not build(batch, Shape(head_size, 1, group, dtype, softcap, most_nodes), device).wrong()


def test_64_nodes_fill_a_word_to_its_sign(device: torch.device) -> None:
    chain, star = tuple(range(-1, 63)), (-1,) * 64
    assert not build([Request(33, chain), Request(31, star)], Shape(32, group=3, dtype=torch.bfloat16), device).wrong()


def test_a_row_sees_what_is_below_the_nodes_its_ancestors_and_itself() -> None:
    # two known rows, the root in slot 9 among them, and four nodes
    words = [-1, -1, *words_of((-1, -1, 1, 0))]
    seen = [visible_slots(row, words, 14, 4)[8:] for row in range(6)]
    assert seen == [[8], [8, 9], [8, 9, 10], [8, 9, 11], [8, 9, 11, 12], [8, 9, 10, 13]]


def test_the_specification_is_causal_attention_where_there_is_no_tree() -> None:
    query, kv = torch.randn(7, 1, 64), torch.randn(1, 1, 12, 128)
    mask = torch.ones(7, 12, dtype=torch.bool).tril(5)
    keys, values = kv.split(64, dim=-1)
    expected = torch.nn.functional.scaled_dot_product_attention(query.transpose(0, 1), keys[0], values[0], mask)
    found = naive_tree_attention(
        query, keys, values, torch.tensor([0, 7]), torch.tensor([12]), torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0]), torch.zeros(7, dtype=torch.int64), scale=0.125,
    )  # fmt: skip
    torch.testing.assert_close(found.float(), expected.transpose(0, 1), rtol=0, atol=1e-5)


def test_no_bit_of_a_node_depends_on_other_requests_or_on_nodes_behind_it(device: torch.device) -> None:
    shape = Shape(48, 1, 3)
    among = build(MIXED, shape, device).attend()
    alone = build(MIXED[2:3], shape, device).attend()
    first = 1 + 1 + len(CHAIN_OF_5)
    assert torch.equal(among[first : first + 1 + len(BUSH)], alone[: 1 + len(BUSH)])
    # other tiles, and other nodes behind
    long = build([replace(MIXED[1], parents=(*CHAIN_OF_5, *range(4, 40)))], shape, device)
    short = build([MIXED[1]], shape, device)
    for name in ("query", "key", "value", "out"):
        long.given[name][:6] = short.given[name][:6]
    long.given["lse"][:, :6] = short.given["lse"][:, :6]
    assert torch.equal(long.attend()[:6], short.attend()[:6])


def test_queries_keys_and_outputs_may_be_parts_of_others(device: torch.device) -> None:
    step = build(MIXED, Shape(), device)
    expected = step.attend()
    query, key, value = step.given["query"], step.given["key"], step.given["value"]
    wide = torch.cat([query, key, value, torch.full_like(query, math.nan)], dim=1)
    wide[:, 8:] = step.given["out"]
    parts = dict(zip(("query", "key", "value", "out"), wide.split((4, 2, 2, 4), dim=1), strict=True))
    step.given |= {name: part for name, part in parts.items() if name != "out"}
    assert torch.equal(step.attend().nan_to_num(), expected.nan_to_num())
    kernel.attend_to_nodes(**step.given | {"out": parts["out"]}, scale=0.125, softcap=0.0, most_nodes=64)
    assert torch.equal(parts["out"].nan_to_num(), expected.nan_to_num())
    assert torch.equal(parts["query"].nan_to_num(), query.nan_to_num())


@pytest.mark.skipif(HAS_GPU, reason="keys are noted in the interpreter")
def test_one_kernel_serves_every_step_of_an_engine(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    keys = watch(monkeypatch, (kernel, "_attend"))
    shape = Shape(32, dtype=torch.bfloat16, most_nodes=24)
    for batch in (MIXED, MIXED[:1], MIXED[1:2], [Request(700, tuple(range(-1, 23)))], MIXED * 4):
        build(batch, shape, device).attend()
    assert len(keys) == 5 and len(set(keys)) == 1
