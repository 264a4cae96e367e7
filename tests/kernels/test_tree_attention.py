"""Tree attention against its specification, and against itself where not even a bit may differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from vllm_specrollout.kernels.tree_attention.kernel import tree_attention
from vllm_specrollout.kernels.tree_attention.launch import SPLITS_PER_SIZE, num_splits
from vllm_specrollout.kernels.tree_attention.naive import naive_tree_attention, visible_slots

CHAIN_OF_5 = (-1, 0, 1, 2, 3)
BUSH = (-1, 0, 0, 2, -1, 4, 2)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Request:
    """`seed` fixes keys, values and queries by slot: equal requests hold equal numbers wherever they stand."""

    context: int
    """Keys whose rows are not in the batch."""
    known: int = 1
    """Rows of known tokens."""
    parents: tuple[int, ...] = ()
    seed: int = 0

    @property
    def rows(self) -> int:
        return self.known + len(self.parents)

    @property
    def keys(self) -> int:
        return self.context + self.rows


@dataclass(frozen=True)
class Shape:
    head_size: int = 64
    kv_heads: int = 2
    group: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None


@dataclass
class Batch:
    tensors: tuple[torch.Tensor, ...]
    """query, key cache, value cache, query_start_loc, seq_lens, block_table, num_nodes, ancestors."""
    requests: list[Request]
    scale: float

    def attend(self, **options: Any) -> torch.Tensor:
        """The kernel's output; what it does not write is NaN."""
        query, *rest = self.tensors
        out = torch.full_like(query, float("nan"))
        lengths = {
            "max_query_len": max(request.rows for request in self.requests),
            "max_seq_len": max(request.keys for request in self.requests),
        }
        tree_attention(query, rest[0], rest[1], out, *rest[2:], scale=self.scale, **{**lengths, **options})
        return out

    def check(self, **options: Any) -> None:
        out = self.attend(split_size=64, **options)
        expected = naive_tree_attention(*self.tensors, scale=self.scale, **options)
        rows = int(self.tensors[3][-1])
        error = (out[:rows].double() - expected[:rows]).abs().max().item()
        assert error <= TOLERANCE[out.dtype] * options.get("v_scale", 1.0)
        assert out[rows:].isnan().all()


def words_of(parents: tuple[int, ...]) -> list[int]:
    """Ancestors as signed words."""
    words: list[int] = []
    for node, parent in enumerate(parents):
        words.append(1 << node | (words[parent] if parent >= 0 else 0))
    return [word - 2**64 if word >= 2**63 else word for word in words]


def content(request: Request, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """[keys, Hkv, 2 D] keys before values, and [rows, Hq, D] queries; float32, the same by slot for every length."""
    numbers = torch.Generator().manual_seed(request.seed)
    most = 1400
    kv = torch.randn(most, shape.kv_heads, 2 * shape.head_size, generator=numbers)
    queries = torch.randn(most, shape.kv_heads * shape.group, shape.head_size, generator=numbers)
    return kv[: request.keys], queries[request.context : request.keys]


def build(requests: list[Request], shape: Shape, device: torch.device, seed: int = 0, padding: int = 0) -> Batch:
    """Lay requests out in shuffled blocks, with NaN wherever nothing is written; `padding` empty requests, and rows."""
    numbers = torch.Generator().manual_seed(seed)
    size = shape.block_size
    widest = max(-(-request.keys // size) for request in requests) + 1
    order = torch.randperm(widest * len(requests), generator=numbers).tolist()
    cache = torch.full((len(order) + 1, shape.kv_heads, size, 2 * shape.head_size), float("nan"))
    table = torch.full((len(requests) + padding, widest), len(order), dtype=torch.int32)
    rows = sum(request.rows for request in requests)
    query = torch.randn(rows + padding, shape.kv_heads * shape.group, shape.head_size, generator=numbers)
    ancestors = torch.full((rows + padding,), -1, dtype=torch.int64)  # words of known rows mean nothing
    start = [0]
    for i, request in enumerate(requests):
        kv, queries = content(request, shape)
        blocks = [order.pop() for _ in range(-(-request.keys // size))]
        table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for slot in range(request.keys):
            cache[blocks[slot // size], :, slot % size] = kv[slot]
        query[start[-1] : start[-1] + request.rows] = queries
        start.append(start[-1] + request.rows)
        if request.parents:
            ancestors[start[-1] - len(request.parents) : start[-1]] = torch.tensor(words_of(request.parents))
    cache = cache.to(shape.dtype).to(shape.cache_dtype or shape.dtype).to(device)
    tensors = (
        query.to(shape.dtype).to(device),
        cache[..., : shape.head_size],
        cache[..., shape.head_size :],
        torch.tensor(start + [start[-1]] * padding, dtype=torch.int32, device=device),
        torch.tensor([request.keys for request in requests] + [0] * padding, dtype=torch.int32, device=device),
        table.to(device),
        torch.tensor([len(r.parents) for r in requests] + [0] * padding, dtype=torch.int32, device=device),
        ancestors.to(device),
    )
    return Batch(tensors, requests, shape.head_size**-0.5)


MIXED = [
    Request(70, known=9, seed=1),
    Request(66, seed=2),
    Request(50, parents=CHAIN_OF_5, seed=3),
    Request(130, parents=BUSH, seed=4),
    Request(0, known=3, parents=(-1,), seed=5),
]


def test_a_node_sees_its_ancestors_and_nothing_else_of_the_tree(device: torch.device) -> None:
    request = Request(20, known=2, parents=BUSH)
    batch = build([request], Shape(kv_heads=1, group=1), device)
    _, _, values, _, _, table, _, _ = batch.tensors
    for slot in range(request.keys):  # the value of a slot marks it, so the output shows what was seen
        values[table[0, slot // 16], :, slot % 16] = torch.eye(64, device=device)[slot]
    seen = (batch.attend()[:, 0] > 0).cpu()
    known = list(range(22))
    paths = [[], [], [0], [0, 1], [0, 2], [0, 2, 3], [4], [4, 5], [0, 2, 6]]
    assert seen[0].nonzero().flatten().tolist() == known[:21]
    for row, path in list(enumerate(paths))[1:]:
        assert seen[row].nonzero().flatten().tolist() == known + [22 + node for node in path]


def test_the_specification_is_causal_attention_where_there_is_no_tree(device: torch.device) -> None:
    batch = build([Request(5, known=7)], Shape(kv_heads=1, group=1), device)
    query, keys, values, _, _, table, _, _ = batch.tensors
    slots = torch.arange(12, device=device)
    k, v = (cache[table[0].long()[slots // 16], :, slots % 16].transpose(0, 1) for cache in (keys, values))
    mask = torch.ones(7, 12, dtype=torch.bool, device=device).tril(5)
    expected = torch.nn.functional.scaled_dot_product_attention(query.transpose(0, 1), k, v, attn_mask=mask)
    torch.testing.assert_close(
        naive_tree_attention(*batch.tensors, scale=batch.scale).float(), expected.transpose(0, 1), rtol=0, atol=1e-5
    )


def test_a_window_counts_depth_not_row_order() -> None:
    words = [0, *words_of((-1, -1, 1, 0))]
    # the root stands in slot 9, nodes 0 and 1 at position 10, nodes 2 and 3 at 11
    assert visible_slots(3, words, 14, 4, 3) == [9, 11, 12]
    assert visible_slots(4, words, 14, 4, 3) == [9, 10, 13]
    assert visible_slots(4, words, 14, 4, 2) == [10, 13]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (Shape(), {}),
        (Shape(dtype=torch.bfloat16, group=4), {}),
        (Shape(dtype=torch.float16, group=7, block_size=48), {}),
        (Shape(head_size=80, group=1), {}),
        (Shape(head_size=96, dtype=torch.bfloat16), {}),
        (Shape(head_size=128, kv_heads=1, group=7, block_size=32), {"softcap": 5.0}),
        (Shape(head_size=256, kv_heads=1, dtype=torch.bfloat16), {}),
        (Shape(32, 1, 24, dtype=torch.float16), {}),
        (Shape(), {"sliding_window": 1}),
        (Shape(), {"sliding_window": 4}),
        (Shape(dtype=torch.bfloat16, block_size=48), {"sliding_window": 67, "softcap": 20.0}),
        (
            Shape(dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, block_size=32),
            {"k_scale": 0.5, "v_scale": 1.5},
        ),
    ],
    ids=str,
)
def test_a_mixed_batch_agrees_with_the_specification(
    shape: Shape, options: dict[str, float], device: torch.device
) -> None:
    build(MIXED, shape, device, padding=2).check(**options)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.sampled_from([0, 1, 2, 9])))]
    known = draw(st.integers(1, 12)) if draw(st.booleans()) else 1
    return Request(draw(st.integers(0, 200)), known, tuple(parents), draw(st.integers(0, 99)))


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.lists(requests(), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    group=st.sampled_from([1, 3, 4]),
    block_size=st.sampled_from([16, 32, 48]),
    window=st.sampled_from([0, 0, 3, 40, 130]),
    num_programs=st.sampled_from([None, 1, 2]),
)
def test_any_batch_agrees_with_the_specification(
    device: torch.device,
    batch: list[Request],
    dtype: torch.dtype,
    group: int,
    block_size: int,
    window: int,
    num_programs: int | None,
) -> None:
    built = build(batch, Shape(32, 1, group, block_size, dtype), device)
    expected = naive_tree_attention(*built.tensors, scale=built.scale, sliding_window=window)
    out = built.attend(sliding_window=window, split_size=64, num_programs=num_programs)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_64_nodes_fill_a_word_to_its_sign(device: torch.device) -> None:
    chain, star = tuple(range(-1, 63)), (-1,) * 64
    batch = build([Request(33, parents=chain), Request(31, parents=star)], Shape(32, dtype=torch.bfloat16), device)
    batch.check()
    batch.check(sliding_window=50)


@pytest.mark.parametrize("num_programs", [1, None])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (Shape(32, 1, 4, dtype=torch.bfloat16), {}),
        (Shape(48, 1, 7, dtype=torch.bfloat16), {"softcap": 10.0}),
        (Shape(32, 1, 2, dtype=torch.float32), {"sliding_window": 90}),
    ],
    ids=str,
)
def test_a_chain_gives_the_very_bits_of_plain_decoding(
    shape: Shape, options: dict[str, float], num_programs: int | None, device: torch.device
) -> None:
    """Among other neighbours, in other blocks, in tiles of other heights and with its splits shared out or not."""
    chain = Request(180, known=1, parents=tuple(range(-1, 19)), seed=7)
    batch = build([MIXED[0], chain, MIXED[3]], shape, device, seed=1)
    first = int(batch.tensors[3][1])
    out = batch.attend(split_size=64, num_programs=num_programs, **options)[first : first + chain.rows]
    for row in (0, 1, 19):
        alone = build([Request(180 + row, seed=7)], shape, device, seed=2)
        assert torch.equal(alone.attend(split_size=64, **options)[0], out[row])
    prefill = build([Request(160, known=41, seed=7), MIXED[1]], shape, device, seed=3)
    assert torch.equal(prefill.attend(split_size=64, **options)[20:41], out)


def test_sharing_splits_out_changes_no_bit(device: torch.device) -> None:
    batch = build(MIXED[1:4], Shape(32, 1, 2), device)  # one of them has a single split
    expected = batch.attend(split_size=64, num_programs=1)
    for more in ({"num_programs": 2}, {"num_programs": 3}, {"max_seq_len": 3000, "max_query_len": 40}):
        assert torch.equal(batch.attend(split_size=64, **more), expected)


def test_longer_contexts_have_longer_splits(device: torch.device) -> None:
    batch = build([Request(1300, parents=BUSH), Request(600)], Shape(32, 1, 1, 32), device)
    batch.check()
    assert torch.equal(batch.attend(split_size=64, num_programs=1), batch.attend(split_size=64))


def test_splits_double_in_size_by_the_group() -> None:
    group = SPLITS_PER_SIZE.value
    assert [num_splits(keys, 64) for keys in (0, 1, 64, 65, 64 * group)] == [1, 1, 1, 2, group]
    assert num_splits(64 * group + 128, 64) == group + 1
    assert num_splits(64 * group + 129, 64) == group + 2
    assert num_splits(3 * 64 * group + 1, 64) == 2 * group + 1


def test_a_prefill_chunk_among_decoding_requests_leaves_no_tile_out(device: torch.device) -> None:
    """Rows distributed unevenly: tiles are numbered through, and search for their requests."""
    chunk = Request(10, known=70)
    batch = build([Request(9), Request(20, seed=1), chunk, Request(30, parents=BUSH), Request(3)], Shape(32), device)
    batch.check()
    batch = build([chunk, *(Request(n, seed=n) for n in range(1, 7))], Shape(32, group=3), device, padding=3)
    batch.check()


def test_blocks_behind_the_window_may_be_gone(device: torch.device) -> None:
    batch = build([Request(200, parents=BUSH)], Shape(), device)
    expected = batch.attend(sliding_window=24, split_size=64)
    assert not expected.isnan().any()
    batch.tensors[5][0, : (201 - 24) // 16] = batch.tensors[1].shape[0] - 1  # NaN, and amid a tile
    assert torch.equal(batch.attend(sliding_window=24, split_size=64), expected)


def test_rows_of_padding_are_left_alone(device: torch.device) -> None:
    batch = build(MIXED[:1], Shape(), device, padding=3)
    batch.tensors[6][1:] = 5  # what a graph's last replay left behind
    assert batch.attend()[-3:].isnan().all()
    assert not batch.attend()[:-3].isnan().any()


def test_queries_and_outputs_may_be_views(device: torch.device) -> None:
    batch = build(MIXED[2:4], Shape(), device)
    expected = batch.attend()
    query = batch.tensors[0]
    wide = torch.full((query.shape[0], query.shape[1], 3 * query.shape[2]), float("nan"), device=device)
    wide[..., :64] = query
    out = wide[..., 128:]
    batch.tensors = (wide[..., :64], *batch.tensors[1:])
    rest = batch.tensors[3:]
    tree_attention(*batch.tensors[:3], out, *rest, scale=batch.scale, max_query_len=9, max_seq_len=140)
    assert torch.equal(out, expected)
    assert torch.equal(wide[..., :64], query) and wide[..., 64:128].isnan().all()


def test_what_the_kernel_cannot_take_is_refused(device: torch.device) -> None:
    batch = build([Request(5)], Shape(), device)
    with pytest.raises(ValueError, match="multiple of 32"):
        batch.attend(split_size=48)
    batch.scale = 0.0
    with pytest.raises(ValueError, match="scale must be above 0"):
        batch.attend()
    batch = build([Request(5)], Shape(head_size=320), device)
    with pytest.raises(ValueError, match="heads of 320"):
        batch.attend()
    batch = build([Request(5)], Shape(), device)
    query, keys, values, *rest = batch.tensors
    for tensors, problem in (
        ((query.to(torch.float8_e4m3fn), keys, values), "queries of torch.float8_e4m3fn"),
        ((query, keys.to(torch.int8), values.to(torch.int8)), "keys of torch.int8"),
        ((query, keys.to(torch.float8_e5m2), values.to(torch.float8_e5m2)), "keys of torch.float8_e5m2"),
        ((query, keys, values.to(torch.float16)), "values of torch.float16"),
    ):
        with pytest.raises(ValueError, match=problem):
            tree_attention(*tensors, query, *rest, scale=1.0, max_query_len=1, max_seq_len=6)
